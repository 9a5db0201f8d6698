"""Step ``release``: give back what the run still holds. The pipeline's exit handler, so it runs after a failure too."""

from components import component


@component
def release(run_dir: str) -> None:
    """End leftover processes of the run and write ``release.json`` into its directory; the outcome is judged by the run's own events."""
    from training.stage import stage

    with stage("release", run_dir) as run:
        from pathlib import Path

        from infra import local

        run.message = local.release(Path(run_dir)).message
