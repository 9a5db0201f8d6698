"""Step ``evaluate``: candidate and champion on the same test split."""

from kfp import dsl

from components import component


@component
def evaluate(
    config_json: str,
    run_dir: str,
    dataset: dsl.Input[dsl.Dataset],
    model: dsl.Input[dsl.Model],
    evaluation: dsl.Output[dsl.Artifact],
    report: dsl.Output[dsl.HTML],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Write ``evaluate/evaluation.json``, ``report.html`` and TensorBoard events."""
    from training.stage import stage

    with stage("evaluate", run_dir) as run:
        from pathlib import Path

        from infra.registry import Registry
        from training.config_file import parse_config
        from training.evaluate import evaluate

        config, out = parse_config(config_json), Path(run_dir) / "evaluate"
        champion = Registry.of(config).champion(config.name)
        best = champion.checkpoint if champion else None
        result = evaluate(config, Path(dataset.path), Path(model.path), out, champion=best, events=run.events)
        run.artifact("report", out / "report.html")
        evaluation.uri, report.uri = str(out / "evaluation.json"), str(out / "report.html")
        run.message = result.summary
        for name, value in result.metrics.items():
            metrics.log_metric(name, value)
