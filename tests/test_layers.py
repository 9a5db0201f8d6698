"""Who may import whom, read from the source: the table of ARCHITECTURE.md."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("training", "infra", "components", "pipelines")
FORBIDDEN = {
    "training": ("kfp", "google", "kubernetes", "infra", "components", "pipelines"),
    "infra": ("torch", "kfp", "components", "pipelines"),
    "components": ("pipelines", "torch"),
    "pipelines": ("torch", "numba", "apache_beam"),
}
# infra knows only what is pure configuration, roles, errors, records and the look of reports of training.
INFRA_MAY_KNOW = {
    "training.checkpoint",
    "training.config",
    "training.config_file",
    "training.data.manifest",
    "training.embedding.footprint",
    "training.embedding.memory",
    "training.embedding.slots",
    "training.errors",
    "training.evaluation_record",
    "training.events",
    "training.job",
    "training.pod",
    "training.report",
}


def modules():
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(modules())


def imports(path, *, inside_functions):
    """Modules a file imports; ``from a import b`` counts as ``a.b`` where that is a module of ours."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in walk(tree, inside_functions=inside_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def walk(node, *, inside_functions):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) and not inside_functions:
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from walk(child, inside_functions=inside_functions)


@pytest.mark.parametrize("name", MODULES)
def test_a_layer_imports_nothing_above_it(name):
    package = name.split(".")[0]
    found = set(imports(MODULES[name], inside_functions=True))
    wrong = {module for module in found if module.split(".")[0] in FORBIDDEN[package]}
    assert not wrong, f"{name} must not import {sorted(wrong)}"
    if package == "infra":
        unknown = {module for module in found if module.split(".")[0] == "training"} - INFRA_MAY_KNOW
        assert not unknown, f"{name} must not import {sorted(unknown)}"


def test_there_are_no_import_cycles():
    graph = {name: {m for m in imports(path, inside_functions=False) if m in MODULES and m != name} for name, path in MODULES.items()}
    done, line = set(), []

    def visit(name):
        assert name not in line, f"cycle: {' -> '.join([*line[line.index(name) :], name])}"
        if name in done:
            return
        line.append(name)
        for other in sorted(graph[name]):
            visit(other)
        line.pop()
        done.add(name)

    for name in graph:
        visit(name)


def test_importing_every_module_starts_nothing():
    code = f"""
import importlib, os, socket, subprocess, sys, threading
def refuse(*args, **kwargs): raise AssertionError("started something at import")
import apache_beam, kfp.dsl, matplotlib, torch, torch.utils.tensorboard
subprocess.Popen.__init__ = refuse
socket.socket.connect = socket.socket.bind = refuse
before = threading.active_count(), sorted(os.environ.items())
for name in {sorted(MODULES)!r}:
    importlib.import_module(name)
assert (threading.active_count(), sorted(os.environ.items())) == before
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


def test_there_are_no_dumping_grounds():
    assert not {name for name in MODULES if name.split(".")[-1] in ("utils", "helpers", "common", "misc")}


def test_every_package_is_installed():
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert listed == {name for name, path in MODULES.items() if path.name == "__init__.py"}
