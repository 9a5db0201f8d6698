"""The stage verbs: one stage alone, on paths. They call the same functions as the pipeline's steps and draw the same progress."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pipelines.cli_options import CONFIG, SET, writing

if TYPE_CHECKING:
    from training.stage import Stage

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DATA = click.argument("data", type=click.Path(path_type=Path))
_CHECKPOINT = click.argument("checkpoint", type=click.Path(path_type=Path))


@contextmanager
def _shown(name: str) -> Iterator[Stage]:
    """Run a stage in this process with its progress drawn. On the way out no process that it started is left."""
    from infra import processes
    from pipelines.progress import Follower, view
    from training.stage import stage

    with tempfile.TemporaryDirectory(prefix=f"satrap-{name}-") as folder:
        os.environ[processes.MARK] = folder
        os.environ["PYTHONSAFEPATH"] = "1"
        screen = view()
        try:
            with screen, Follower(Path(folder) / "events.jsonl", [screen.handle]), stage(name, folder) as current:
                yield current
        finally:
            processes.terminate(lambda: processes.marked(Path(folder)))


def _output(help_text: str) -> Callable[[_Command], _Command]:
    return click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True, help=help_text)


@click.command()
@CONFIG
@SET
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Directory to write; <output.root>/data/<key> when absent."
)
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Processes to use; the result does not depend on it."
)
@click.option("--reuse/--no-reuse", default=True, show_default=True, help="Keep what is there if input and configuration are unchanged.")
def preprocess(config: Path, overrides: tuple[str, ...], output: Path | None, workers: int, reuse: bool) -> None:
    """Turn raw events into shards and a manifest."""
    from training.config_file import load_config

    loaded = load_config(config, overrides)
    from training.data import preprocess as work

    with _shown("preprocess") as current:
        output = output or Path(loaded.output.root) / "data" / work.data_key(loaded)
        with writing(output), current.reuse_of(output / "manifest.json"):
            manifest = work.preprocess(loaded, output, events=current.events, num_workers=workers, reuse=reuse)
        current.message = f"unchanged input: {manifest.summary}" if current.reused else manifest.summary
    click.echo(str(output))


@click.command()
@CONFIG
@_DATA
@SET
@_output("Directory for report.html and report.json.")
@click.option("--previous", type=click.Path(path_type=Path), help="Data directory of an earlier run, to measure drift against.")
def validate(config: Path, data: Path, overrides: tuple[str, ...], output: Path, previous: Path | None) -> None:
    """Check a data directory against its schema and an earlier one."""
    from training.config_file import load_config

    loaded = load_config(config, overrides)
    from training.data.validate import validate as work

    with _shown("validate") as current, writing(output):
        report = work(loaded, data, output, previous=previous)
        current.message = f"{report.status}, {len(report.findings)} findings"
    click.echo(str(output / "report.html"))


@click.command()
@CONFIG
@_DATA
@SET
@_output("Directory for checkpoint/, tensorboard/ and logs/.")
@click.option("--resume", type=click.Path(path_type=Path), help="Checkpoint, or output of a run that was cut off, to go on from.")
@click.option("--warm-start", type=click.Path(path_type=Path), help="Checkpoint whose weights new training starts from.")
def train(config: Path, data: Path, overrides: tuple[str, ...], output: Path, resume: Path | None, warm_start: Path | None) -> None:
    """Train on a data directory; writes a checkpoint."""
    from training.config_file import load_config

    loaded = load_config(config, overrides)
    from pipelines.summary import metrics_table
    from training.launcher import train as work

    with _shown("train") as current, writing(output):
        result = work(loaded, data, output, events=current.events, resume=resume, warm_start=warm_start)
        current.message = result.summary
    if result.metrics:
        click.echo(metrics_table({"valid": result.metrics}))
    click.echo(str(result.checkpoint))


@click.command()
@CONFIG
@_DATA
@_CHECKPOINT
@SET
@_output("Directory for evaluation.json, report.html and tensorboard/.")
@click.option(
    "--champion",
    type=click.Path(path_type=Path),
    help="Checkpoint or version to compare with on the same test split; the champion of <output.root>/registry when absent.",
)
def evaluate(config: Path, data: Path, checkpoint: Path, overrides: tuple[str, ...], output: Path, champion: Path | None) -> None:
    """Measure a checkpoint on the test split of a data directory."""
    from training.config_file import load_config

    loaded = load_config(config, overrides)
    from infra.registry import Registry
    from pipelines.summary import metrics_table
    from training.evaluate import evaluate as work

    if champion is None:
        present = Registry.of(loaded).champion(loaded.name)
        champion = present.checkpoint if present else None
    elif (champion / "checkpoint").is_dir():
        champion = champion / "checkpoint"
    with _shown("evaluate") as current, writing(output):
        result = work(loaded, data, checkpoint, output, champion=champion, events=current.events)
        current.message = result.summary
    click.echo(metrics_table({"candidate": result.shown}))
    click.echo(str(output / "report.html"))


@click.command()
@CONFIG
@_CHECKPOINT
@click.argument("evaluation", type=click.Path(path_type=Path))
@SET
@click.option("--registry", type=click.Path(file_okay=False, path_type=Path), help="Registry; <output.root>/registry when absent.")
@click.option("--run-id", default="by hand", show_default=True, help="Noted in the version.")
def register(config: Path, checkpoint: Path, evaluation: Path, overrides: tuple[str, ...], registry: Path | None, run_id: str) -> None:
    """Add a checkpoint to the registry, or refuse it with the reason, by its EVALUATION (evaluation.json)."""
    from training.config_file import load_config

    loaded = load_config(config, overrides)
    from infra.registry import Registry
    from pipelines.summary import registration_text

    target = Registry(registry) if registry else Registry.of(loaded)
    with _shown("register") as current:
        done = target.register(loaded.name, checkpoint=checkpoint, evaluation=evaluation, config=loaded, run_id=run_id)
        current.message = registration_text(loaded.name, done.version, promoted=done.promoted, reason=done.reason)


@click.command()
@click.argument("output", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rows", type=click.IntRange(min=100), default=100_000, show_default=True, help="Records.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Equal seeds give equal files.")
@click.option("--malformed", type=click.FloatRange(0.0, 1.0), default=0.0, show_default=True, help="Share of malformed records.")
@click.option("--missing", type=click.FloatRange(0.0, 1.0), default=0.05, show_default=True, help="Share of missing values.")
@click.option("--alpha", type=click.FloatRange(0.0, 5.0), default=1.1, show_default=True, help="Exponent of the ids' Zipf distribution.")
@click.option("--slots", type=click.IntRange(1), default=26, show_default=True, help="Categorical features.")
@click.option("--dense", type=click.IntRange(0), default=13, show_default=True, help="Numeric features.")
@click.option("--ids-per-slot", type=click.IntRange(2), default=10_000, show_default=True, help="Distinct ids of each slot.")
def synth(output: Path, **settings: float) -> None:
    """Make Criteo-shaped clicks in OUTPUT, with the configuration to run on them and the truth behind them."""
    from training.data.synth import synth as work

    with writing(output):
        work(output, **settings)  # type: ignore[arg-type]
    click.echo(f"{output / 'satrap.yaml'}")


COMMANDS = (preprocess, validate, train, evaluate, register, synth)
