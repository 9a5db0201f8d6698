"""The registry: the gate's verdicts, immutable versions, and what survives concurrency, kills and full disks."""

import json
import math
import multiprocessing
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from infra.gate import decide
from infra.registry import Registry
from training.checkpoint import CheckpointManifest, digests
from training.config import Config, GateConfig
from training.errors import RegistryError
from training.evaluation_record import ChampionScore, EvaluationRecord, ModelScore, checkpoint_digest

NAME = "clicks"


def config(**gate):
    return Config.model_validate(
        {
            "name": NAME,
            "data": {"paths": ["x.csv"], "format": "csv"},
            "schema": {"label": {"column": "y"}, "categorical": [{"name": "user"}]},
            "split": {"by": "hash"},
            "evaluation": {"gate": gate},
        }
    )


def make_checkpoint(path: Path, content: str, *, size: int = 100) -> Path:
    """A complete checkpoint whose weights are made up."""
    part = path / "embedding" / "server-0-of-1" / "table-0"
    part.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "dense.pt").write_bytes(content.encode() * size)
    (part / "rows.npy").write_bytes(content[::-1].encode() * size)
    manifest = CheckpointManifest(
        format_version=1,
        name=NAME,
        step=10,
        steps_per_epoch=10,
        config_digest="c",
        feature_digest="f",
        fingerprint="d",
        rows={},
        parts=[],
        metrics={},
        files=digests(path),
    )
    (path / "manifest.json").write_text(manifest.model_dump_json())
    return path


def score(auc=0.8, *, checkpoint="somewhere", digest="0", calibration=1.0, **more):
    metrics = {"auc": auc, "log_loss": 0.4, "normalized_entropy": 0.9, "calibration": calibration, **more}
    undefined = {name: "all 5 labels are 0" for name, value in metrics.items() if value is None}
    return ModelScore(checkpoint=checkpoint, checkpoint_digest=digest, step=10, metrics=metrics, undefined=undefined)


def evaluated(candidate, champion=None, **fields):
    return EvaluationRecord(
        name=NAME,
        config_digest="c",
        feature_digest="f",
        data_fingerprint="d",
        rows=1000,
        positives=100,
        candidate=candidate,
        champion=champion,
        slices=[],
        **fields,
    )


def against(value):
    """A champion that was scored (or, given a text, could not be)."""
    if isinstance(value, str):
        return ChampionScore(checkpoint="old", checkpoint_digest="1", score=None, incomparable=value)
    return ChampionScore(checkpoint="old", checkpoint_digest="1", score=value)


def evaluate_into(path: Path, checkpoint: Path, registry: Registry, auc=0.8, champion_auc=0.8) -> Path:
    """Write the evaluation that ``satrap evaluate`` would write now."""
    present = registry.champion(NAME)
    rival = None
    if present is not None:
        digest = checkpoint_digest(present.checkpoint)
        scored = score(champion_auc, checkpoint=str(present.checkpoint), digest=digest)
        rival = ChampionScore(checkpoint=str(present.checkpoint), checkpoint_digest=digest, score=scored)
    record = evaluated(score(auc, checkpoint=str(checkpoint), digest=checkpoint_digest(checkpoint)), rival)
    path.write_text(record.model_dump_json())
    return path


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


@pytest.fixture
def submit(registry, tmp_path):
    """``submit("a", auc=0.9)``: train, evaluate and register a candidate."""

    def run(content, *, auc=0.8, champion_auc=0.8, settings=None, size=100):
        checkpoint = tmp_path / f"checkpoint-{content}"
        if not checkpoint.exists():
            make_checkpoint(checkpoint, content, size=size)
        evaluation = evaluate_into(tmp_path / f"evaluation-{content}.json", checkpoint, registry, auc, champion_auc)
        return registry.register(NAME, checkpoint=checkpoint, evaluation=evaluation, config=settings or config(), run_id=f"run-{content}")

    return run


@pytest.mark.parametrize(
    ("gate", "candidate", "champion", "promote", "words"),
    [
        ({}, score(0.7), None, True, "first version: auc 0.7 on 1000 test records"),
        ({"min_value": 0.75}, score(0.7), None, False, "auc 0.7 is below gate.min_value 0.75"),
        ({"min_value": 0.7}, score(0.7), None, True, "first version"),
        ({"metric": "log_loss", "min_value": 0.3}, score(), None, False, "log_loss 0.4 is above gate.min_value 0.3"),
        ({"metric": "log_loss", "min_value": 0.4}, score(), None, True, "first version"),
        ({"metric": "calibration", "min_value": 0.95}, score(calibration=0.9), None, False, "is below gate.min_value 0.95"),
        ({}, score(calibration=1.3), None, False, "calibration 1.3000 is off 1 by 0.3000, above gate.max_calibration_error 0.2"),
        ({}, score(calibration=1.2), None, True, "first version"),
        ({"max_calibration_error": None}, score(calibration=9.0), None, True, "first version"),
        ({}, score(calibration=None), None, False, "calibration of the candidate is undefined: all 5 labels are 0"),
        ({}, score(None), None, False, "auc of the candidate is undefined: all 5 labels are 0"),
        ({}, score(0.900), against(score(0.901)), True, "improvement -0.001000, at least gate.min_improvement -0.001"),
        ({}, score(0.8999), against(score(0.901)), False, "improvement -0.001100, below gate.min_improvement -0.001"),
        ({"min_improvement": 0.01}, score(0.91), against(score(0.90)), True, "improvement +0.010000"),
        ({"min_improvement": 0.01}, score(0.909), against(score(0.90)), False, "auc 0.909 against the champion's 0.9 on the same 1000"),
        ({"metric": "log_loss", "min_improvement": 0.05}, score(log_loss=0.35), against(score()), True, "improvement +0.050000"),
        ({"metric": "log_loss", "min_improvement": 0.0}, score(log_loss=0.41), against(score()), False, "improvement -0.010000"),
        ({"metric": "calibration", "min_improvement": 0.0}, score(calibration=1.1), against(score(calibration=0.95)), False, "-0.05"),
        ({"metric": "calibration", "min_improvement": 0.0}, score(calibration=0.96), against(score(calibration=1.05)), True, "+0.01"),
        ({}, score(0.99), against("other features"), False, "cannot be compared (other features) and gate.if_incomparable is refuse"),
        ({"if_incomparable": "promote"}, score(0.6), against("other features"), True, "gate.if_incomparable is promote"),
        ({"if_incomparable": "promote", "min_value": 0.7}, score(0.6), against("other features"), False, "below gate.min_value"),
        ({}, score(0.9), against(score(None)), False, "its auc is undefined"),
    ],
)
def test_the_gate_decides_by_numbers_and_says_them(gate, candidate, champion, promote, words):
    decision = decide(GateConfig.model_validate(gate), evaluated(candidate, champion))
    assert decision.promote is promote
    assert words in decision.reason


def test_the_gate_names_every_absolute_limit_that_is_broken():
    reason = decide(GateConfig(min_value=0.9), evaluated(score(0.7, calibration=2.0))).reason
    assert "gate.min_value" in reason
    assert "gate.max_calibration_error" in reason


def test_a_first_version_is_promoted_and_complete(registry, submit, tmp_path):
    done = submit("a")
    assert (done.version, done.promoted) == (1, True)
    champion = registry.champion(NAME)
    assert champion.number == 1
    assert champion.path == tmp_path / "registry" / NAME / "v1"
    assert CheckpointManifest.load(champion.checkpoint).step == 10  # verifies every digest
    assert EvaluationRecord.load(champion.path / "evaluation.json").candidate.metrics["auc"] == 0.8
    assert champion.record.run_id == "run-a"
    assert champion.record.replaced is None
    assert registry.verify(NAME, 1) == champion


def test_a_registry_without_the_model_has_no_champion_versions_or_refusals(registry):
    assert registry.champion(NAME) is None
    assert registry.versions(NAME) == []
    assert registry.refusals(NAME) == []
    with pytest.raises(RegistryError, match="clicks has no version v3; it has none"):
        registry.version(NAME, 3)


def test_the_registry_of_a_configuration_lies_under_its_output_root(tmp_path):
    tree = config().to_dict() | {"output": {"root": str(tmp_path / "out")}}
    assert Registry.of(Config.model_validate(tree)).root == tmp_path / "out" / "registry"


def test_a_better_candidate_takes_over_and_the_old_version_stays(registry, submit):
    submit("a")
    done = submit("b", auc=0.85)
    assert (done.version, done.promoted) == (2, True)
    assert "improvement +0.05" in done.reason
    assert [version.number for version in registry.versions(NAME)] == [1, 2]
    assert registry.champion(NAME).record.replaced == 1
    registry.verify(NAME, 1)


def test_a_refused_candidate_is_recorded_but_copied_nowhere(registry, submit, tmp_path):
    submit("a")
    before = sorted(path.name for path in (tmp_path / "registry" / NAME).iterdir())
    done = submit("b", auc=0.5)
    assert (done.version, done.promoted) == (None, False)
    assert "improvement -0.300000" in done.reason
    [refusal] = registry.refusals(NAME)
    assert (refusal["run_id"], refusal["reason"], refusal["metrics"]["auc"]) == ("run-b", done.reason, 0.5)
    after = sorted(path.name for path in (tmp_path / "registry" / NAME).iterdir())
    assert after == sorted([*before, "refusals.jsonl"])
    assert submit("c", auc=0.9).version == 2, "a refusal uses up no number"


def test_a_refusal_of_a_killed_process_does_not_spoil_the_next(registry, submit, tmp_path):
    submit("a")
    submit("b", auc=0.5)
    with (tmp_path / "registry" / NAME / "refusals.jsonl").open("a") as file:
        file.write('{"time": "2')
    assert len(registry.refusals(NAME)) == 1
    submit("c", auc=0.4)
    assert [refusal["run_id"] for refusal in registry.refusals(NAME)] == ["run-b", "run-c"]


def test_registering_the_champion_again_changes_nothing(registry, submit, tmp_path):
    submit("a")
    checkpoint, evaluation = tmp_path / "checkpoint-a", tmp_path / "evaluation-a.json"
    done = registry.register(NAME, checkpoint=checkpoint, evaluation=evaluation, config=config(), run_id="again")
    assert (done.version, done.promoted) == (1, True)
    assert "registered before, as v1" in done.reason
    assert len(registry.versions(NAME)) == 1


def test_an_evaluation_against_an_older_champion_is_refused(registry, submit, tmp_path):
    submit("a")
    late = make_checkpoint(tmp_path / "late", "late")
    stale = evaluate_into(tmp_path / "stale.json", late, registry, auc=0.99)
    submit("b")
    with pytest.raises(RegistryError, match="champion moved from v1 to v2 since evaluation: run evaluate again"):
        registry.register(NAME, checkpoint=late, evaluation=stale, config=config(), run_id="late")
    assert registry.champion(NAME).number == 2


def test_an_evaluation_without_champion_is_refused_once_there_is_one(registry, submit, tmp_path):
    late = make_checkpoint(tmp_path / "late", "late")
    stale = evaluate_into(tmp_path / "stale.json", late, registry)
    submit("a")
    with pytest.raises(RegistryError, match="champion moved from none to v1"):
        registry.register(NAME, checkpoint=late, evaluation=stale, config=config(), run_id="late")


def test_an_evaluation_of_another_checkpoint_or_model_is_refused(registry, tmp_path):
    first, second = make_checkpoint(tmp_path / "1", "a"), make_checkpoint(tmp_path / "2", "b")
    evaluation = evaluate_into(tmp_path / "evaluation.json", first, registry)
    with pytest.raises(RegistryError, match=f"is of checkpoint {first}, not of {second}; run evaluate on"):
        registry.register(NAME, checkpoint=second, evaluation=evaluation, config=config(), run_id="r")
    with pytest.raises(RegistryError, match="is of model 'clicks', not 'other'"):
        registry.register("other", checkpoint=first, evaluation=evaluation, config=config(), run_id="r")


@pytest.mark.parametrize("name", ["../clicks", "a/b", "", ".", "x" * 65, "1st", "a\nb"])
def test_a_name_that_could_leave_the_registry_is_refused(registry, name):
    with pytest.raises(RegistryError, match="cannot name a model"):
        registry.champion(name)


@pytest.mark.parametrize("missing", ["evaluation", "checkpoint"])
def test_a_missing_evaluation_or_checkpoint_is_named(registry, tmp_path, missing):
    checkpoint = make_checkpoint(tmp_path / "c", "a")
    evaluation = evaluate_into(tmp_path / "evaluation.json", checkpoint, registry)
    (evaluation if missing == "evaluation" else checkpoint / "manifest.json").unlink()
    with pytest.raises(RegistryError, match=r"nothing to register: .*(evaluation\.json|manifest\.json)"):
        registry.register(NAME, checkpoint=checkpoint, evaluation=evaluation, config=config(), run_id="r")


def test_a_checkpoint_damaged_since_its_evaluation_does_not_become_a_version(registry, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "c", "a")
    evaluation = evaluate_into(tmp_path / "evaluation.json", checkpoint, registry)
    (checkpoint / "dense.pt").write_bytes(b"other")
    with pytest.raises(RegistryError, match=r"dense\.pt: damaged .* nothing was registered"):
        registry.register(NAME, checkpoint=checkpoint, evaluation=evaluation, config=config(), run_id="r")
    (checkpoint / "dense.pt").unlink()
    with pytest.raises(RegistryError, match=r"dense\.pt: missing"):
        registry.register(NAME, checkpoint=checkpoint, evaluation=evaluation, config=config(), run_id="r")
    assert visible(registry) == []


def test_a_checkpoint_with_links_is_refused(registry, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "c", "a")
    (checkpoint / "link").symlink_to("dense.pt")
    evaluation = evaluate_into(tmp_path / "evaluation.json", checkpoint, registry)
    with pytest.raises(RegistryError, match="plain files only"):
        registry.register(NAME, checkpoint=checkpoint, evaluation=evaluation, config=config(), run_id="r")


def test_files_of_a_version_are_read_only_copies(registry, submit, tmp_path):
    submit("a")
    version = registry.champion(NAME)
    files = [path for path in version.path.rglob("*") if path.is_file()]
    assert {path.relative_to(version.path).as_posix() for path in files} == {*version.record.files, "version.json"}
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o444 for path in files)
    (tmp_path / "checkpoint-a" / "dense.pt").write_bytes(b"the run's own file changes")
    registry.verify(NAME, 1)


def test_verify_names_what_was_changed_lost_or_added(registry, submit):
    submit("a")
    version = registry.champion(NAME)
    dense = version.checkpoint / "dense.pt"
    dense.chmod(0o644)
    content = bytearray(dense.read_bytes())
    content[7] ^= 1
    dense.write_bytes(content)
    (version.path / "evaluation.json").unlink()
    (version.checkpoint / "extra").write_text("x")
    with pytest.raises(RegistryError) as caught:
        registry.verify(NAME, 1)
    for problem in ("evaluation.json is missing", "checkpoint/extra was added", "checkpoint/dense.pt was changed"):
        assert problem in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "{}"])
def test_a_damaged_version_record_is_named(registry, submit, text):
    submit("a")
    path = registry.champion(NAME).path / "version.json"
    path.chmod(0o644)
    path.write_text(text)
    with pytest.raises(RegistryError, match=r"version\.json: damaged"):
        registry.verify(NAME, 1)


def test_an_alias_that_points_nowhere_is_an_error_not_a_first_version(registry, submit, tmp_path):
    submit("a")
    (tmp_path / "registry" / NAME / "v1").rename(tmp_path / "elsewhere")
    with pytest.raises(RegistryError, match="points to v1, which is gone"):
        registry.champion(NAME)


def test_a_champion_set_back_by_hand_stays_and_numbers_go_on(registry, submit, tmp_path):
    submit("a")
    submit("b")
    link = tmp_path / "registry" / NAME / "champion"
    link.unlink()
    link.symlink_to("v1")
    assert submit("c", auc=0.1).promoted is False
    assert registry.champion(NAME).number == 1
    assert submit("d").version == 3
    assert registry.champion(NAME).record.replaced == 1


def visible(registry):
    directory = registry.root / NAME
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))


def compete(root, folder, index, barrier):
    """Register one candidate, evaluating again as often as another process was faster."""
    registry = Registry(root)
    checkpoint = make_checkpoint(folder / f"checkpoint-{index}", f"model {index} ")
    barrier.wait(timeout=30)
    while True:
        evaluation = evaluate_into(folder / f"evaluation-{index}.json", checkpoint, registry)
        try:
            registry.register(NAME, checkpoint=checkpoint, evaluation=evaluation, config=config(), run_id=str(index))
        except RegistryError as error:
            if "champion moved" not in str(error):
                raise
        else:
            return


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_eight_processes_register_at_once_without_gaps_or_lost_versions(registry, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=compete, args=(registry.root, tmp_path, i, barrier)) for i in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0] * 8
    versions = registry.versions(NAME)
    assert [version.number for version in versions] == list(range(1, 9))
    assert {version.record.run_id for version in versions} == {str(i) for i in range(8)}
    assert [version.record.replaced for version in versions] == [None, *range(1, 8)]
    assert registry.champion(NAME).number == 8
    for version in versions:
        registry.verify(NAME, version.number)


KILLED = """
import os, signal, sys
from pathlib import Path
from infra import registry
from infra.registry import Registry
from training.config_file import parse_config

root, checkpoint, evaluation, where = sys.argv[1:5]
config = parse_config(sys.stdin.read())

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

if where == "copying":
    original, seen = registry._copy, []
    def copy(source, target):
        seen.append(source)
        if len(seen) == 3:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(b"half")
            die()
        return original(source, target)
    registry._copy = copy
elif where == "before the rename":
    Path.rename = die
else:
    registry._finish_promotion = lambda directory, first=[True]: None if first.pop() else die()
    registry._finish_promotion.__defaults__[0][:] = [False, True]
Registry(Path(root)).register("clicks", checkpoint=Path(checkpoint), evaluation=Path(evaluation), config=config, run_id="killed")
"""


@pytest.mark.parametrize(("where", "becomes"), [("copying", 2), ("before the rename", 2), ("before the alias moves", 3)])
def test_a_process_killed_while_registering_leaves_a_registry_that_works(registry, submit, tmp_path, where, becomes):
    submit("a")
    checkpoint = make_checkpoint(tmp_path / "killed", "k")
    evaluation = evaluate_into(tmp_path / "killed.json", checkpoint, registry)
    arguments = [sys.executable, "-c", KILLED, str(registry.root), str(checkpoint), str(evaluation), where]
    done = subprocess.run(arguments, input=config().to_json(), text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert registry.champion(NAME).number == 1
    assert len(registry.versions(NAME)) == becomes - 1
    leftovers = [path.name for path in (registry.root / NAME).iterdir() if path.name.startswith(".incoming")]
    assert bool(leftovers) is (becomes == 2)
    if becomes == 3:
        # The version is complete, only its promotion was cut short: the next registration completes it and asks for a new evaluation.
        with pytest.raises(RegistryError, match="champion moved from v1 to v2"):
            submit("b")
        assert registry.champion(NAME).number == 2
    assert submit("b").version == becomes
    registry.verify(NAME, becomes)
    assert not [path.name for path in (registry.root / NAME).iterdir() if path.name.startswith(".") and path.name != ".lock"]


def test_a_full_disk_adds_no_version_and_says_so(registry, submit):
    submit("a")
    before = visible(registry)
    make_checkpoint(registry.root.parent / "checkpoint-big", "big", size=100_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(RegistryError, match=r"registering failed: File too large.*free space or fix the permissions"):
            submit("big")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert visible(registry) == before
    assert not list((registry.root / NAME).glob(".incoming-*"))
    assert submit("big").version == 2


def test_a_lock_held_too_long_is_reported_with_its_holder(submit, registry, tmp_path):
    submit("a")
    registry.lock_timeout_seconds = 0.0
    other = Registry(registry.root)
    with (
        other._locked(registry.root / NAME),
        pytest.raises(RegistryError, match=f"process {os.getpid()} has been registering for over 0 s"),
    ):
        submit("b")
    assert submit("b").version == 2


def test_a_root_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    registry = Registry(tmp_path / "file" / "registry")
    checkpoint = make_checkpoint(tmp_path / "c", "a")
    record = evaluated(score(digest=checkpoint_digest(checkpoint)))
    (tmp_path / "evaluation.json").write_text(record.model_dump_json())
    with pytest.raises(RegistryError, match=r"cannot be written .*choose another output\.root"):
        registry.register(NAME, checkpoint=checkpoint, evaluation=tmp_path / "evaluation.json", config=config(), run_id="r")


def test_readers_see_a_champion_at_every_moment_of_its_replacement(registry, submit, monkeypatch):
    submit("a")
    seen = []
    replace, rename = Path.replace, Path.rename

    def watched(original):
        def move(self, target):
            seen.append(registry.champion(NAME).number)
            result = original(self, target)
            seen.append(registry.champion(NAME).number)
            return result

        return move

    monkeypatch.setattr(Path, "replace", watched(replace))
    monkeypatch.setattr(Path, "rename", watched(rename))
    submit("b")
    assert seen == [1, 1, 1, 2]


def test_the_registry_imports_no_torch():
    text = "import sys, infra.registry; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text], timeout=60, check=False).returncode == 0


def test_metrics_without_a_value_survive_the_way_into_a_version(registry, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "c", "a")
    record = evaluated(score(digest=checkpoint_digest(checkpoint), normalized_entropy=None))
    (tmp_path / "evaluation.json").write_text(record.model_dump_json())
    registry.register(NAME, checkpoint=checkpoint, evaluation=tmp_path / "evaluation.json", config=config(), run_id="r")
    stored = json.loads((registry.champion(NAME).path / "version.json").read_text())
    assert stored["metrics"]["normalized_entropy"] is None
    assert math.isclose(stored["metrics"]["auc"], 0.8)
