from pathlib import Path

import pytest
import yaml

from pipelines.compile import compile_pipeline, ir_digest

GOLDEN = Path(__file__).parent / "golden" / "pipeline.yaml"


@pytest.fixture(scope="module")
def text():
    return compile_pipeline()


@pytest.fixture(scope="module")
def tree(text):
    return yaml.safe_load(text)


def test_the_compiled_pipeline_is_the_golden_file(text):
    assert text == GOLDEN.read_text(encoding="utf-8"), "if the change is wanted: satrap compile -o tests/pipelines/golden/pipeline.yaml"


def test_compiling_twice_gives_equal_bytes(text):
    assert compile_pipeline() == text
    assert ir_digest(compile_pipeline()) == ir_digest(text)


def test_no_step_installs_anything(tree):
    for executor in tree["deploymentSpec"]["executors"].values():
        assert "pip install" not in " ".join(executor["container"]["command"])


def test_every_step_runs_in_the_image_asked_for():
    tree = yaml.safe_load(compile_pipeline("registry.example/satrap-python@sha256:1"))
    assert {e["container"]["image"] for e in tree["deploymentSpec"]["executors"].values()} == {"registry.example/satrap-python@sha256:1"}


def test_no_task_is_cached_because_each_writes_into_the_directory_of_its_run(tree):
    tasks = {**tree["root"]["dag"]["tasks"], **tree["components"]["comp-exit-handler-1"]["dag"]["tasks"]}
    steps = {name: task for name, task in tasks.items() if name != "exit-handler-1"}
    assert set(steps) == {"provision", "preprocess", "validate", "train", "evaluate", "register", "release"}
    assert all(task["cachingOptions"] == {} for task in steps.values())


def test_the_order_is_that_of_the_design_and_release_runs_whatever_happened(tree):
    tasks = tree["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    after = {name: set(task.get("dependentTasks", [])) for name, task in tasks.items()}
    assert after == {
        "provision": set(),
        "preprocess": set(),
        "validate": {"preprocess"},
        "train": {"preprocess", "validate", "provision"},
        "evaluate": {"preprocess", "train"},
        "register": {"train", "evaluate"},
    }
    release = tree["root"]["dag"]["tasks"]["release"]
    assert release["dependentTasks"] == ["exit-handler-1"]
    assert release["triggerPolicy"]["strategy"] == "ALL_UPSTREAM_TASKS_COMPLETED"


def test_components_are_thin():
    for path in (Path(__file__).parents[2] / "components").glob("[a-z]*.py"):
        body = path.read_text(encoding="utf-8").split('"""')[-1]
        lines = [line for line in body.splitlines() if line.strip() and "import" not in line and "with stage" not in line]
        assert len(lines) <= 10, path
