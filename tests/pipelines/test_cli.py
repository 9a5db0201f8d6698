import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra import processes
from training.config_file import load_config

CONFIG = {
    "name": "m",
    "data": {"paths": ["a.csv"], "format": "csv"},
    "schema": {"label": {"column": "y"}, "categorical": [{"name": "a"}]},
    "split": {"by": "hash"},
}
HEAVY = {"torch", "apache_beam", "kfp", "numpy", "numba", "pyarrow", "pydantic", "rich", "yaml", "google.protobuf"}
COMMANDS = {
    "run",
    "compile",
    "plan",
    "profile",
    "preprocess",
    "validate",
    "train",
    "evaluate",
    "register",
    "config",
    "synth",
    "tensorboard",
    "role",
    "runs",
}


@pytest.fixture
def satrap(tmp_path, monkeypatch):
    """Run the command in an empty directory that holds ``satrap.yaml``."""
    (tmp_path / "satrap.yaml").write_text(yaml.safe_dump(CONFIG))
    (tmp_path / "tmp").mkdir()

    def run(*arguments, **options):
        environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp"), "NO_COLOR": "1"}
        command = [sys.executable, "-m", "pipelines.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, **options)

    return run


def test_help_lists_the_commands_and_no_others(satrap):
    shown = satrap("--help")
    assert shown.returncode == 0
    listed = re.findall(r"^  ([a-z]+)  ", shown.stdout.split("Commands:")[1], re.MULTILINE)
    assert set(listed) == COMMANDS


def test_help_of_every_command_imports_nothing_heavy():
    code = (
        "import sys\n"
        "from click.testing import CliRunner\n"
        "from pipelines.cli import cli\n"
        f"for name in [''] + sorted({sorted(COMMANDS)!r}):\n"
        "    result = CliRunner().invoke(cli, [*filter(None, [name]), '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        f"heavy = {HEAVY!r} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["config", "show", "nowhere.yaml"], 2, "nowhere.yaml: no such file"),
        (["config", "show", "satrap.yaml", "--set", "training.epoch=1"], 2, "did you mean 'epochs'?"),
        (["run", "satrap.yaml", "--set", "name=x y"], 2, "name: got 'x y'"),
        (["run"], 2, "Missing argument 'CONFIG'"),
        (["fly"], 2, "No such command 'fly'"),
        (["runs", "--rooot", "x"], 2, "No such option"),
        (["tensorboard"], 2, "no runs here; start one with `satrap run CONFIG`"),
        (
            ["train", "satrap.yaml", "nowhere", "-o", "out"],
            1,
            "nowhere: no manifest.json, so not a finished data directory; run `satrap preprocess`",
        ),
        (["role", "waiter", "--index", "0", "--job", "job.json"], 2, "'waiter' is not one of 'parameter_server'"),
        (["role", "parameter_server", "--index", "0", "--job", "job.json"], 1, "job.json: no such file"),
        (["preprocess", "satrap.yaml"], 1, "a.csv"),
    ],
)
def test_a_users_mistake_is_told_in_words_with_its_exit_status(satrap, arguments, status, told):
    result = satrap(*arguments)
    assert (result.returncode, told in result.stderr) == (status, True), result.stderr
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["compile", "-o", "/dev/full"], "/dev/full"),
        (["synth", "clicks", "--rows", "5000"], "clicks"),
        (["preprocess", "clicks.yaml", "-o", "out"], ""),
        (["run", "clicks.yaml", "--set", "output.root=out"], "out"),
    ],
)
def test_a_full_disk_is_told_in_one_line(satrap, clicks_yaml, tmp_path, arguments, place):
    # No file may grow beyond a page, which to a program is what a full disk is.
    shutil.copy(clicks_yaml, tmp_path / "clicks.yaml")
    shutil.copy(clicks_yaml.parent / "clicks.csv", tmp_path)
    limited = None if "/dev/full" in arguments else lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    result = satrap(*arguments, preexec_fn=limited)
    assert result.returncode == 1, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "File too large" in line or "No space left" in line
    assert place in line
    assert "choose another place (output.root, -o)" in line
    assert result.stderr.splitlines()[-1] == line
    assert "Traceback" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["synth", "file/out", "--rows", "200"],
        ["compile", "-o", "file/out/p.yaml"],
        ["preprocess", "clicks.yaml", "-o", "file/out"],
        ["run", "clicks.yaml", "--set", "output.root=file/out"],
        ["run", "clicks.yaml", "--set", "output.root=/proc/out"],
        ["validate", "clicks.yaml", "data", "-o", "file/out"],
    ],
    ids=" ".join,
)
def test_an_output_that_cannot_be_made_is_told_in_one_line(satrap, clicks_yaml, clicks_data, tmp_path, arguments):
    (tmp_path / "file").write_text("")
    (tmp_path / "data").symlink_to(clicks_data)
    shutil.copy(clicks_yaml, tmp_path / "clicks.yaml")
    shutil.copy(clicks_yaml.parent / "clicks.csv", tmp_path)
    result = satrap(*arguments)
    assert result.returncode == 1, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert "out" in line
    assert "choose another place (output.root, -o)" in line or "name another output directory" in line
    assert "Traceback" not in result.stdout + result.stderr


def test_several_config_problems_are_one_line_each(satrap):
    result = satrap("config", "show", "satrap.yaml", "--set", "training.epochs=0", "--set", "training.mode=x")
    assert result.stderr.splitlines() == [
        "error:",
        "  training.mode: 'x' is not one of 'sync', 'hybrid' or 'async'",
        "  training.epochs: got 0, input should be greater than 0",
    ]


def test_config_show_prints_the_resolved_tree(satrap, tmp_path):
    shown = satrap("config", "show", "satrap.yaml", "--set", "training.epochs=7")
    expected = load_config(tmp_path / "satrap.yaml", ["training.epochs=7"]).to_dict()
    assert yaml.safe_load(shown.stdout) == expected


def test_compile_writes_the_golden_pipeline(satrap, tmp_path):
    result = satrap("compile", "-o", "out/pipeline.yaml")
    assert result.returncode == 0, result.stderr
    golden = Path(__file__).parent / "golden" / "pipeline.yaml"
    assert (tmp_path / "out" / "pipeline.yaml").read_text() == golden.read_text()


def test_runs_without_any_says_so(satrap):
    result = satrap("runs")
    assert (result.returncode, result.stdout) == (0, "no runs in satrap-runs\n")


def test_an_unexpected_error_is_a_short_message_and_a_log(tmp_path):
    code = (
        "import sys; from pipelines import cli, runs\n"
        "def broken(root): raise ZeroDivisionError('by nothing')\n"
        "runs.list_runs = broken\n"
        "sys.argv = ['satrap', 'runs']\n"
        "cli.main()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 1
    assert "error: unexpected ZeroDivisionError: by nothing" in result.stderr
    assert "Traceback (most recent" not in result.stderr
    log = Path(result.stderr.strip().split("Traceback: ")[1])
    assert "ZeroDivisionError: by nothing" in log.read_text()


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    code = f"{sys.executable} -m pipelines.cli config show satrap.yaml | true; echo ${{PIPESTATUS[0]}}"
    (tmp_path / "satrap.yaml").write_text(yaml.safe_dump({**CONFIG, "data": {"paths": ["x" * 90] * 5000, "format": "csv"}}))
    result = subprocess.run(["bash", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (result.stdout.strip(), result.stderr) == ("1", "")


def test_a_stage_verb_stopped_by_a_signal_says_so_and_exits_130(tmp_path):
    code = (
        "import os, sys, time, types\n"
        "fake = types.ModuleType('training.data.validate')\n"
        "def validate(*args, **kwargs):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(60)\n"
        "fake.validate = validate\n"
        "sys.modules['training.data.validate'] = fake\n"
        "from pipelines import cli\n"
        "sys.argv = ['satrap', 'validate', 'satrap.yaml', 'data', '-o', 'out']\n"
        "cli.main()\n"
    )
    (tmp_path / "satrap.yaml").write_text(yaml.safe_dump(CONFIG))
    for number in (signal.SIGINT, signal.SIGTERM):
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout.readline() == "up\n"
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors.endswith("interrupted\n")
        assert "Traceback" not in errors


def test_tensorboard_opens_the_latest_run(tmp_path):
    from training.config_file import parse_config

    config = parse_config(json.dumps({**CONFIG, "output": {"root": str(tmp_path)}}))
    from pipelines.runs import begin

    record, run_dir = begin(config, ir_digest="0")
    (run_dir / "train" / "tensorboard").mkdir(parents=True)
    command = [sys.executable, "-m", "pipelines.cli", "tensorboard", "--root", str(tmp_path)]
    environment = {**os.environ, processes.MARK: str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) as process:
        try:
            line = process.stdout.readline()
            assert re.fullmatch(rf"TensorBoard of {record.id}: http://localhost:\d+/ \(Ctrl-C ends it\)\n", line)
        finally:
            process.terminate()
            process.wait()
    assert processes.marked(tmp_path) == []
