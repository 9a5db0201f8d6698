"""Step ``validate``: the data against its declared schema and against the previous run's data."""

from kfp import dsl

from components import component


@component
def validate(config_json: str, run_dir: str, previous: str, dataset: dsl.Input[dsl.Dataset], report: dsl.Output[dsl.HTML]) -> None:
    """Write ``validate/report.html`` and ``report.json``. ``previous`` is the data directory to compare with, empty for none."""
    from training.stage import stage

    with stage("validate", run_dir) as run:
        from pathlib import Path

        from training.config_file import parse_config
        from training.data.validate import validate

        report.uri = str(Path(run_dir) / "validate" / "report.html")
        run.artifact("validation_report", report.path)
        earlier = Path(previous) if previous else None
        checked = validate(parse_config(config_json), Path(dataset.path), Path(report.path).parent, previous=earlier)
        run.message = f"{checked.status}, {len(checked.findings)} findings"
