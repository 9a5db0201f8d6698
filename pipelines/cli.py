"""The ``satrap`` command. Commands import what they need when they run, so that ``--help`` is instant.

Exit status: 0 done; 1 a ``SatrapError`` or a failed run; 2 a wrong configuration or command line; 130 stopped by a signal.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipelines import cli_plan, cli_stages
from pipelines.cli_options import CONFIG, ROOT, SET, writing
from training.errors import ConfigError, SatrapError, os_error_text

if TYPE_CHECKING:
    from pipelines.runs import RunRecord


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="satrap", message="satrap %(version)s")
def cli() -> None:
    """Hybrid training of recommender models: from raw clicks to a registered model."""


@cli.command()
@CONFIG
@SET
@click.option(
    "--resume", metavar="RUN", help="Go on with the training of an earlier run (its id, or a part of it) from its newest checkpoint."
)
def run(config: Path, overrides: tuple[str, ...], resume: str | None) -> None:
    """Run the whole pipeline on this machine: preprocess, validate, train, evaluate, register."""
    from training.config_file import load_config

    loaded = load_config(config, overrides)
    from pipelines.progress import view
    from pipelines.run_local import run_local
    from pipelines.runs import find_run
    from pipelines.summary import run_report
    from training.checkpoint import check_resumable, newest_checkpoint

    start = newest_checkpoint(find_run(loaded.output.root, resume)[1] / "train") if resume else None
    if start:
        check_resumable(start, loaded)
    record, run_dir = run_local(loaded, view(), resume=start)
    click.echo(run_report(record, run_dir))
    if record.error:
        click.echo(record.error if record.status == "interrupted" else f"error: {record.error}", err=True)
    sys.exit(_exit_status(record))


def _exit_status(record: RunRecord) -> int:
    if record.status == "interrupted":
        return 130
    if record.status == "succeeded":
        return 0
    stage = record.failed_stage
    return 2 if stage is not None and record.stages[stage].error == "ConfigError" else 1


@cli.command("compile")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), required=True, help="YAML file to write.")
@click.option("--image", help="Container image of the steps; it must hold this project.")
def compile_command(output: Path, image: str | None) -> None:
    """Write the pipeline as YAML for Kubeflow or Vertex AI."""
    from pipelines.compile import compile_pipeline, ir_digest

    text = compile_pipeline(image) if image else compile_pipeline()
    with writing(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    click.echo(f"{output}: sha256 {ir_digest(text)}")


@cli.group("config")
def config_group() -> None:
    """Look at the configuration of a run."""


@config_group.command("show")
@CONFIG
@SET
def config_show(config: Path, overrides: tuple[str, ...]) -> None:
    """Print the resolved configuration, with every default, as YAML."""
    import yaml

    from training.config_file import load_config

    click.echo(yaml.safe_dump(load_config(config, overrides).to_dict(), sort_keys=False, allow_unicode=True), nl=False)


@cli.command()
@ROOT
@click.option("--json", "as_json", is_flag=True, help="Print the whole records as JSON lines.")
def runs(root: Path, as_json: bool) -> None:
    """List runs, oldest first, with status, metrics and model versions."""
    from pipelines.runs import list_runs
    from pipelines.summary import runs_table

    found = list_runs(root)
    if as_json:
        for record, _ in found:
            click.echo(record.model_dump_json())
    else:
        click.echo(runs_table([record for record, _ in found]) if found else f"no runs in {root}")


@cli.command()
@click.argument("run_id", metavar="[RUN]", required=False)
@ROOT
@click.option("--all", "every", is_flag=True, help="All runs beside one another, to compare them.")
@click.option("--port", type=click.IntRange(1, 65535), help="Port to listen on; the first free one from 6006 when absent.")
@click.option("--host", default="localhost", show_default=True, help="Address to listen on.")
def tensorboard(run_id: str | None, root: Path, every: bool, port: int | None, host: str) -> None:
    """Open the logs of a run (its id, or a part of it; the latest when absent) in TensorBoard."""
    from pipelines.runs import find_run

    record, run_dir = find_run(root, run_id)
    port = port or _free_port(host)
    shown, logs = (f"all runs in {root}", run_dir.parent) if every else (record.id, run_dir)
    click.echo(f"TensorBoard of {shown}: http://{host}:{port}/ (Ctrl-C ends it)")
    sys.stdout.flush()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--host", host, "--port", str(port)]
    # Replaces this process: nothing is left to clean up, and signals reach TensorBoard itself.
    os.execv(sys.executable, command)  # noqa: S606


@cli.command()
@click.argument("path", metavar="RUN_OR_DIR")
@ROOT
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="File to write; trace.json beside the profile when absent."
)
def profile(path: str, root: Path, output: Path | None) -> None:
    """Write a Chrome trace of a run's first steps (RUN: its id or a part of it; DIR: a train output), and print where their time went.

    The run must have been trained with training.profile_steps. Open the file in https://ui.perfetto.dev or chrome://tracing.
    """
    from pipelines.runs import find_run
    from training.profile import write_trace

    folder = Path(path) if Path(path).is_dir() else find_run(root, path)[1]
    written, table = write_trace(folder, output)
    click.echo(f"{table}\n{written}")


def _free_port(host: str) -> int:
    import socket

    for port in (*range(6006, 6026), 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise ConfigError([f"--host {host}: no port can be opened on this address"])


@cli.command()
@click.argument("name", type=click.Choice(["parameter_server", "embedding_worker", "data_loader", "nn_worker"]))
@click.option("--index", type=click.IntRange(min=0), help="Which of the role's processes this is; a pod's environment says it when absent.")
@click.option("--job", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The job.json that `satrap train` wrote.")
def role(name: str, index: int | None, job: Path) -> None:
    """Run one process of a role."""
    from training.pod import index_of
    from training.roles import run_role

    sys.exit(run_role(name, index=index_of(os.environ) if index is None else index, job=job))


for command in (cli_plan.plan, *cli_stages.COMMANDS):
    cli.add_command(command)


def main() -> None:
    """Entry point of the console script: errors become one text and an exit status."""
    try:
        cli.main(prog_name="satrap", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except SatrapError as error:
        click.echo(_error_text(error), err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except OSError as error:
        click.echo(f"error: {os_error_text(error)}", err=True)
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 - the last line of defence: a user sees a message, the log keeps the traceback
        click.echo(
            f"error: unexpected {type(error).__name__}: {error}\nThis is a defect of satrap. Traceback: {_keep_traceback()}", err=True
        )
        sys.exit(1)


def _error_text(error: SatrapError) -> str:
    from training.stage import room_text

    lines = room_text(str(error)).splitlines()
    return f"error: {lines[0]}" if len(lines) == 1 else "\n".join(["error:", *(f"  {line}" for line in lines)])


def _keep_traceback() -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="satrap-error-", suffix=".log", delete=False, encoding="utf-8") as log:
        traceback.print_exc(file=log)
    return Path(log.name)


if __name__ == "__main__":
    main()
