import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from kfp import compiler, dsl

from infra import processes
from pipelines import run_local
from pipelines.progress import PlainView
from pipelines.runs import RunRecord, list_runs
from training.config_file import load_config
from training.events import read_events

WAIT_SECONDS = 60.0
CONFIG = {
    "name": "m",
    "data": {"paths": ["a.csv"], "format": "csv"},
    "schema": {"label": {"column": "y"}, "categorical": [{"name": "a"}]},
    "split": {"by": "hash"},
    "output": {"root": "out"},
}
# Runs the given pipeline instead of ours; everything else is what `satrap run` does.
RUN = """
import sys
from pathlib import Path
from pipelines import cli, run_local
run_local.compile_pipeline = Path(sys.argv[1]).read_text
sys.argv = ["satrap", "run", "satrap.yaml"]
cli.main()
"""


@dsl.component(base_image="python", install_kfp_package=False)
def hang(run_dir: str, stubborn: bool):
    import subprocess
    import sys

    from training.stage import stage

    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN); " if stubborn else ""
    code = f"import signal, time; {ignore}print('up', flush=True); time.sleep(600)"
    with stage("train", run_dir) as run:
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
        child.stdout.readline()
        run.events.emit("note", stage="train", message=f"child {child.pid}")
        child.wait()


@dsl.component(base_image="python", install_kfp_package=False)
def hold(run_dir: str):
    """A stage that ends its child on the way out, as training does with its roles."""
    import subprocess
    import sys

    from training.stage import stage

    with stage("train", run_dir) as run:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        try:
            run.events.emit("note", stage="train", message=f"child {child.pid}")
            child.wait()
        finally:
            child.kill()
            child.wait()


@dsl.component(base_image="python", install_kfp_package=False)
def be_killed(run_dir: str):
    import os
    import signal

    from training.stage import stage

    with stage("train", run_dir):
        os.kill(os.getpid(), signal.SIGKILL)


@dsl.component(base_image="python", install_kfp_package=False)
def leave_early(run_dir: str):
    import os

    print("\x1b[91mlast words\x1b[0m")
    os._exit(7)


@dsl.component(base_image="python", install_kfp_package=False)
def echo(config_json: str, run_dir: str, previous: str, resume: str):
    import json
    import os
    import pathlib
    import sys

    given = {"config_json": config_json, "previous": previous, "resume": resume, "python": sys.executable, "path": sys.path}
    pathlib.Path(run_dir, "echo.json").write_text(json.dumps({**given, "tmp": os.environ["TMPDIR"]}))


def pipeline_of(path, component, **constants):
    names = [name for name in component.component_spec.inputs if name not in constants]

    @dsl.pipeline(name="test")
    def test(config_json: str, run_dir: str, previous: str = "", resume: str = ""):
        given = {"config_json": config_json, "run_dir": run_dir, "previous": previous, "resume": resume}
        component(**{name: given[name] for name in names}, **constants)

    compiler.Compiler().compile(test, str(path))
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "satrap.yaml").write_text(yaml.safe_dump(CONFIG))
    return tmp_path


@pytest.fixture
def start(folder):
    running = []

    def start_(pipeline):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", RUN, str(pipeline)], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        running.append(process)
        return process

    yield start_
    for process in running:
        process.kill()
        process.communicate()
    for _, run_dir in list_runs(folder / "out"):
        processes.terminate(lambda: processes.marked(run_dir), grace_seconds=0.0)  # noqa: B023


def wait_for(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def child_of_the_only_run(folder):
    """Run directory and pid of the hanging step's child, once it is up."""

    def look():
        for _, run_dir in list_runs(folder / "out"):
            notes = [event["message"] for event in read_events(run_dir / "events.jsonl") if event["kind"] == "note"]
            if notes:
                return run_dir, int(notes[0].split()[1])
        return None

    return wait_for(look)


def temporary_directory_of(pid):
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return Path(next(entry for entry in environment if entry.startswith(b"TMPDIR=")).decode()[7:])


@pytest.mark.parametrize(("number", "stubborn"), [(signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_ends_every_process_of_the_run_and_is_recorded(folder, start, number, stubborn):
    process = start(pipeline_of(folder / "p.yaml", hang, stubborn=stubborn))
    run_dir, child = child_of_the_only_run(folder)
    scratch = temporary_directory_of(child)
    assert scratch.is_dir()
    process.send_signal(number)
    if stubborn:  # A second signal cuts the grace period short; it must not leave anything either.
        wait_for(lambda: len(processes.marked(run_dir)) == 1)
        process.send_signal(number)
    output, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130
    assert processes.marked(run_dir) == []
    assert processes.started(child) is None
    assert not scratch.exists()
    ((record, _),) = list_runs(folder / "out")
    assert (record.status, record.stages["train"].status) == ("interrupted", "interrupted")
    assert json.loads((run_dir / "release.json").read_text())["outcome"] == "interrupted"
    assert "interrupted in" in output
    assert "Traceback" not in output + errors


def test_a_killed_run_takes_its_processes_with_it_and_reads_as_interrupted(folder, start):
    process = start(pipeline_of(folder / "p.yaml", hang, stubborn=False))
    run_dir, child = child_of_the_only_run(folder)
    scratch = temporary_directory_of(child)
    process.kill()
    process.wait()
    wait_for(lambda: processes.marked(run_dir) == [] and not scratch.exists())
    assert processes.started(child) is None
    ((record, _),) = list_runs(folder / "out")
    assert record.status == "interrupted"
    assert json.loads((run_dir / "release.json").read_text())["outcome"] == "interrupted"
    # The file itself says so, too, for whoever reads it without us.
    stored = json.loads((run_dir / "run.json").read_text())
    assert (stored["status"], stored["stages"]["train"]["status"]) == ("interrupted", "interrupted")
    assert "was killed" in stored["error"]


def test_a_stage_ends_even_if_all_that_watch_over_it_are_killed(folder, start):
    process = start(pipeline_of(folder / "p.yaml", hold))
    run_dir, child = child_of_the_only_run(folder)
    scratch = temporary_directory_of(child)
    runner = next(pid for pid in processes.marked(run_dir) if b"pipelines.local_runner" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(process.pid, signal.SIGSTOP)  # So that it cannot clear up between the two.
    os.kill(runner, signal.SIGKILL)
    process.kill()
    process.wait()
    wait_for(lambda: processes.marked(run_dir) == [])
    assert processes.started(child) is None
    ((record, _),) = list_runs(folder / "out")
    assert record.status == "interrupted"
    shutil.rmtree(scratch)  # Nobody was left to do it.


def test_a_stage_that_was_killed_has_failed_and_is_named(folder, start):
    process = start(pipeline_of(folder / "p.yaml", be_killed))
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    ((record, run_dir),) = list_runs(folder / "out")
    assert (record.status, record.failed_stage, record.stages["train"].status) == ("failed", "train", "failed")
    assert "error: train: its process was killed (out of memory? see the kernel log)" in errors
    assert json.loads((run_dir / "release.json").read_text())["failed_stage"] == "train"


def test_a_runner_that_was_killed_is_a_failed_run_that_says_so(folder, start):
    process = start(pipeline_of(folder / "p.yaml", hold))
    run_dir, _ = child_of_the_only_run(folder)
    runner = next(pid for pid in processes.marked(run_dir) if b"pipelines.local_runner" in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(runner, signal.SIGKILL)
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    assert "the process that executes the pipeline was killed by SIGKILL" in errors
    assert processes.marked(run_dir) == []


def test_a_record_that_cannot_be_written_fails_the_run_in_one_line(folder, monkeypatch):
    def full(self, run_dir):
        raise OSError(errno.ENOSPC, "No space left on device", str(run_dir / "run.json"))

    @contextmanager
    def runner_of_nothing(run_dir, stop):
        (run_dir / "release.json").write_text("{}")
        monkeypatch.setattr(RunRecord, "save", full)
        with subprocess.Popen([sys.executable, "-c", ""]) as process:
            yield process

    monkeypatch.setattr(run_local, "_runner", runner_of_nothing)
    monkeypatch.chdir(folder)
    record, run_dir = run_local.run_local(load_config(folder / "satrap.yaml"), PlainView(io.StringIO()))
    assert record.status == "failed"
    assert record.error == (
        f"the record of the run could not be written: {run_dir / 'run.json'}: No space left on device; "
        "free space there, or choose another place (output.root, -o)"
    )


def test_a_pipeline_that_dies_outside_any_stage_is_a_failed_run_that_names_its_log(folder, start):
    process = start(pipeline_of(folder / "p.yaml", leave_early))
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 1
    ((record, run_dir),) = list_runs(folder / "out")
    assert record.status == "failed"
    assert "outside any stage" in errors
    assert "\x1b" not in record.error
    assert str(run_dir / "logs" / "pipeline.log") in record.error
    log = (run_dir / "logs" / "pipeline.log").read_text()
    assert "last words" in log
    assert "\x1b" not in log


def test_a_step_gets_the_configuration_unchanged_and_this_interpreter(folder, start):
    # kfp.local replaces python3 in arguments by the interpreter's path, and the current directory must not shadow our packages.
    (folder / "training").mkdir()
    (folder / "training" / "__init__.py").write_text("raise SystemExit('shadowed')")
    tree = {**CONFIG, "data": {"paths": ['/usr/lib/python3/it\'s a "file" {{$.x}}.csv'], "format": "csv"}}
    (folder / "satrap.yaml").write_text(yaml.safe_dump(tree))
    process = start(pipeline_of(folder / "p.yaml", echo))
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    ((_, run_dir),) = list_runs(folder / "out")
    assert process.returncode == 0, errors + (run_dir / "logs" / "pipeline.log").read_text()
    seen = json.loads((run_dir / "echo.json").read_text())
    assert json.loads(seen["config_json"])["data"]["paths"] == tree["data"]["paths"]
    assert (seen["previous"], seen["resume"]) == ("", "")
    assert Path(seen["python"]).samefile(sys.executable)
    assert str(folder) not in seen["path"]
    assert "" not in seen["path"]
    assert not Path(seen["tmp"]).exists()
    assert os.path.commonpath([seen["tmp"], run_dir]) != str(run_dir), "unix socket paths must stay short"
