"""Step ``register``: the candidate becomes the champion, or is refused with the reason."""

from kfp import dsl

from components import component


@component
def register(config_json: str, run_dir: str, model: dsl.Input[dsl.Model], evaluation: dsl.Input[dsl.Artifact]) -> None:
    """Add a version to the registry under ``<output.root>/registry`` if the gate lets it."""
    from training.stage import stage

    with stage("register", run_dir) as run:
        from pathlib import Path

        from infra.registry import Registry
        from training.config_file import parse_config

        config, run_id = parse_config(config_json), Path(run_dir).name
        done = Registry.of(config).register(
            config.name, checkpoint=Path(model.path), evaluation=Path(evaluation.path), config=config, run_id=run_id
        )
        run.message = f"v{done.version}: {done.reason}" if done.promoted else f"refused: {done.reason}"
        run.events.emit("registration", version=done.version, promoted=done.promoted, reason=done.reason)
