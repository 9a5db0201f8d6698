"""Step ``preprocess``: raw events to shards and a manifest, in a directory that later runs with the same input and configuration reuse."""

from kfp import dsl

from components import component


@component
def preprocess(config_json: str, run_dir: str, dataset: dsl.Output[dsl.Dataset]) -> None:
    """Write, or reuse, ``<output.root>/data/<key>``. ``dataset`` is that directory."""
    from training.stage import stage

    with stage("preprocess", run_dir) as run:
        from pathlib import Path

        from training.config_file import parse_config
        from training.data.preprocess import data_key, preprocess

        config = parse_config(config_json)
        dataset.uri = str(Path(config.output.root).absolute() / "data" / data_key(config))
        with run.reuse_of(Path(dataset.path) / "manifest.json"):
            manifest = preprocess(config, Path(dataset.path), events=run.events)
        run.message = f"unchanged input: {manifest.summary}" if run.reused else manifest.summary
        run.artifact("data", dataset.path)
        dataset.metadata["fingerprint"] = manifest.fingerprint
