"""Step ``provision``: make the machines ready. On one machine that is a check that the tables fit."""

from components import component


@component
def provision(config_json: str, run_dir: str) -> None:
    """Check that the run fits the machine; writes ``provision.json`` into the run's directory."""
    from training.stage import stage

    with stage("provision", run_dir) as run:
        from pathlib import Path

        from infra import local
        from training.config_file import parse_config

        run.message = local.provision(parse_config(config_json), Path(run_dir)).message
