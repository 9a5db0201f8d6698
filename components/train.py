"""Step ``train``: shards to a checkpoint, by the roles of the hybrid trainer."""

from kfp import dsl

from components import component


@component
def train(config_json: str, run_dir: str, resume: str, dataset: dsl.Input[dsl.Dataset], model: dsl.Output[dsl.Model]) -> None:
    """Write ``train/checkpoint`` and ``train/tensorboard``. ``resume`` is a checkpoint to go on from, empty to begin anew."""
    from training.stage import stage

    with stage("train", run_dir) as run:
        from pathlib import Path

        from training.config_file import parse_config
        from training.launcher import train

        config, start = parse_config(config_json), Path(resume) if resume else None
        result = train(config, Path(dataset.path), Path(run_dir) / "train", events=run.events, resume=start)
        run.artifact("checkpoint", result.checkpoint)
        run.message = result.summary
        model.uri, model.metadata["steps"] = str(result.checkpoint), result.steps
