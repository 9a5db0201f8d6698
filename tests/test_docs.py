"""The documents say what is so: links lead somewhere, commands exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from pipelines.cli import cli
from training.config_file import load_config

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
FENCE = re.compile(r"```(?:\w*)\n(.*?)```", re.DOTALL)


def name(path):
    return str(path.relative_to(ROOT))


def anchors(text):
    headings = re.findall(r"^#+\s+(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def commands(document):
    """Shell lines of the code blocks that start with make or satrap, without prompts and comments."""
    for block in FENCE.findall(document.read_text(encoding="utf-8")):
        for line in block.splitlines():
            line = line.strip().removeprefix("$ ").split("  #")[0].strip()
            line = re.sub(r"^\.venv/bin/", "", line)
            if line.startswith(("make ", "satrap ")):
                yield line


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_to_files_and_headings(document):
    text = document.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{name(document)}: {target}"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{name(document)}: {target}"


def test_the_readme_is_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_every_make_target_and_satrap_command_in_the_documents_exists(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in commands(document):
        words = shlex.split(line)
        if words[0] == "make":
            assert set(words[1:]) <= targets, f"{name(document)}: {line}"
        else:
            parse(words[1:], f"{name(document)}: {line}")


def parse(words, where):
    """Let click parse a command line without running it."""
    command, context = cli, click.Context(cli, info_name="satrap")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0]) if words and not words[0].startswith("-") else None
        if found is None:
            assert words in (["--help"], ["-h"], ["--version"]), where
            return
        command, words = found, words[1:]
    if "--help" not in words:
        try:
            command.make_context(command.name, list(words))
        except click.ClickException as error:
            raise AssertionError(f"{where}: {error.format_message()}") from None


def test_the_readmes_configuration_is_one(tmp_path):
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "satrap.yaml").write_text(text, encoding="utf-8")
    assert load_config(tmp_path / "satrap.yaml").name == "shop"


def test_the_readme_lists_every_command():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in cli.commands:
        assert f"`{command}" in text, command


def test_every_adr_says_context_decision_rejected_and_consequences():
    records = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))
    numbers = [record.name[:4] for record in records]
    assert numbers == sorted(set(numbers))
    for record in records:
        headings = re.findall(r"^## (.*)$", record.read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == ["Context", "Decision", "Rejected", "Consequences"], record.name


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_readmes_commands_run_one_after_the_other(tmp_path):
    """What stands below the quickstart, in order, smaller than there; ``tensorboard``, which never ends, is left to its own test."""
    shutil.copytree(ROOT / "examples" / "adult", tmp_path / "examples" / "adult")
    folder = Path(sys.executable).parent
    text = (ROOT / "README.md").read_text(encoding="utf-8").split("## Quickstart")[1].split("\n## ")[0]
    written = [
        line.split("  #")[0].strip() for line in text.splitlines() if line.startswith(".venv/bin/satrap ") and "tensorboard" not in line
    ]
    lines = [line.replace("--rows 200000", "--rows 2000") for line in written]
    lines = [line if "--set training.epochs" in line or " run " not in line else f"{line} --set training.epochs=1" for line in lines]
    assert [line.split()[1] for line in lines] == ["runs", "run", "synth", "run"], "a new command needs a thought here"
    for line in [*lines, ".venv/bin/satrap config show examples/adult/satrap.yaml", ".venv/bin/satrap runs"]:
        command = [str(folder / "satrap"), *shlex.split(line)[1:]]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, f"{line}: {result.stdout}{result.stderr}"
    listed = result.stdout.splitlines()[1:]
    assert [line.split()[1] for line in listed] == ["succeeded", "succeeded"]
    assert [line.split()[0].split("-")[0] for line in listed] == ["adult", "synth"]
