import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from training.config import Config
from training.config_file import load_config
from training.data import beam_steps, pieces, preprocess
from training.data.manifest import Manifest
from training.data.shards import ShardReader
from training.data.signs import sign_of
from training.errors import DataError, DeadLetterError, ManifestError, SourceError
from training.events import EventLog, read_events

SCHEMA = {
    "time": {"column": "t"},
    "dense": [{"name": "x", "transforms": ["log1p", "standardise"]}],
    "categorical": [{"name": "c"}, {"name": "tags", "separator": "|"}, {"name": "x_bucket", "column": "x", "bucketise": {"quantiles": 5}}],
}
BY_TIME = {"by": "time", "fractions": {"train": 0.7, "valid": 0.2, "test": 0.1}}


def log(rows, seed=0, first=0):
    """Records in no order of time, many with equal times, some malformed."""
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(first, first + rows):
        tags = "|".join(f"t{t}" for t in rng.integers(0, 9, rng.integers(0, 5)))
        label = "bad" if i % 97 == 5 else int(rng.random() < 0.3)
        x = "" if rng.random() < 0.1 else f"{rng.lognormal(2, 1):.3f}"
        lines.append(f"{label},c{rng.integers(0, 60)},{rng.integers(0, 300)},{x},{tags},{i}\n")
    return "y,c,t,x,tags,n\n" + "".join(lines)


def content(folder):
    """Every file but the manifest's source paths."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    manifest = json.loads(files.pop("manifest.json"))
    return files, manifest


@pytest.fixture
def two_files(configure):
    files = {"a.csv": log(900).encode(), "b.csv.gz": gzip.compress(log(700, seed=1, first=900).encode())}
    return configure(
        files, data={"chunk_bytes": 4096, "max_dead_fraction": 0.05}, schema=SCHEMA, split=BY_TIME, evaluation={"slices": ["c", "x_bucket"]}
    )


def test_runs_and_runners_give_the_same_bytes(two_files, run, monkeypatch):
    monkeypatch.setattr("training.data.assembly.SHARD_ROWS", 300)
    _, first = run(two_files, "first")
    _, second = run(two_files, "second", runner="BundleBasedDirectRunner")
    assert content(first) == content(second)


def test_two_workers_give_the_same_bytes_as_one(two_files, run):
    manifest, one = run(two_files, "one")
    _, two = run(two_files, "two", num_workers=2)
    assert content(one) == content(two)
    assert sum(manifest.dead.values()) == 17
    leftovers = [path for path in one.parent.iterdir() if ".building-" in path.name]
    assert leftovers == []


def test_records_are_in_order_of_time_then_of_input(two_files, run, monkeypatch):
    monkeypatch.setattr("training.data.assembly.SHARD_ROWS", 100)
    numbered = Config.model_validate(
        two_files.to_dict() | {"schema": two_files.to_dict()["schema"] | {"dense": [{"name": "n", "transforms": [], "fill": 0.0}]}}
    )
    manifest, folder = run(numbered)
    assert [entry.rows for entry in manifest.shards if entry.split == "train"][:-1] == [100] * (manifest.rows("train") // 100)
    rows = []
    for split in ("train", "valid", "test"):
        with ShardReader.open(folder, split) as reader:
            batch = reader.read(0, reader.rows)
            rows += list(zip(batch.time.tolist(), batch.dense[:, 0].tolist(), strict=True))
    assert rows == sorted(rows)
    assert len(rows) == 1600 - 17
    times = [(entry.first_time, entry.last_time) for entry in manifest.shards]
    assert times == sorted(times)


def test_without_a_time_records_keep_the_order_of_the_input(configure, run, monkeypatch):
    monkeypatch.setattr("training.data.assembly.SHARD_ROWS", 64)
    files = {f"{name}.csv": log(150, first=first).encode() for name, first in (("a", 0), ("b", 150), ("c", 300))}
    schema = {"dense": [{"name": "n", "fill": 0.0}]}
    config = configure(files, data={"chunk_bytes": 1024, "max_dead_fraction": 0.1}, schema=schema)
    manifest, folder = run(config)
    with ShardReader.open(folder, "train") as reader:
        numbers = reader.read(0, reader.rows).dense[:, 0].tolist()
    assert numbers == [i for i in range(450) if i % 97 != 5]
    assert [entry.rows for entry in manifest.shards] == [64] * 6 + [61]
    assert [entry.file for entry in manifest.shards][:2] == ["train/part-00000.arrow", "train/part-00001.arrow"]


def test_statistics_equal_a_plain_count(two_files, run):
    manifest, folder = run(two_files)
    lines = [line.split(",") for file in (0, 1) for line in log(900 if file == 0 else 700, file, file * 900).splitlines()[1:]]
    good = [line for line in lines if line[0] != "bad"]
    valid_from, test_from = manifest.cut_points
    train = [line for line in good if int(line[2]) < valid_from]
    test = [line for line in good if int(line[2]) >= test_from]
    statistics = manifest.splits["train"]
    values = np.array([float(line[3]) for line in train if line[3]])
    assert (statistics.rows, statistics.positives) == (len(train), sum(line[0] == "1" for line in train))
    assert manifest.rows("train") / len(good) == pytest.approx(0.7, abs=0.01)
    dense = statistics.dense["x"]
    assert (dense.rows, dense.missing, dense.min, dense.max) == (len(train), len(train) - len(values), values.min(), values.max())
    assert (dense.mean, dense.std) == (pytest.approx(values.mean()), pytest.approx(values.std()))
    assert dense.counts == np.bincount(np.searchsorted(dense.edges, values, side="right"), minlength=len(dense.edges) + 1).tolist()
    tags = [[tag for tag in line[4].split("|") if tag] for line in train]
    slot = statistics.slots["tags"]
    assert (slot.missing, slot.ids, slot.distinct) == (tags.count([]), sum(map(len, tags)), len({t for each in tags for t in each}))
    names = [line[1] for line in train]
    expected = sorted(((name, names.count(name)) for name in set(names)), key=lambda item: (-item[1], item[0]))[:20]
    assert statistics.slots["c"].top == expected
    signs = np.load(folder / "ids" / "c.npy")
    assert signs.tolist() == sorted(sign_of(name, "c") for name in set(names))
    assert manifest.splits["test"].slots["c"].unseen == sum(line[1] not in names for line in test)
    assert sum(manifest.splits["test"].slots["c"].bucket_counts) == len(test)
    with ShardReader.open(folder, "test") as reader:
        assert sorted(reader.slice_values("c", 0, reader.rows).tolist()) == sorted(line[1] for line in test)


def test_dead_letters_tell_file_line_reason_and_record(two_files, run, dead_letters):
    manifest, folder = run(two_files)
    letters = dead_letters(folder)
    assert manifest.dead == {"label not understood": 17}
    numbers = [i for i in range(1600) if i % 97 == 5]
    expected = [("a.csv" if i < 900 else "b.csv.gz", i + 2 if i < 900 else i - 900 + 2) for i in numbers]
    assert [(Path(letter["file"]).name, letter["line"]) for letter in letters] == expected
    assert letters[0]["reason"] == "label not understood"
    assert letters[0]["detail"] == "y: 'bad' is not 0 or 1"
    assert letters[0]["record"] == log(900).splitlines()[6]


def test_undecodable_records_are_kept_byte_by_byte(configure, run, dead_letters):
    config = configure({"log.csv": b"y,c\n1,a\n0,caf\xe9\n"}, data={"max_dead_fraction": 0.5})
    _, folder = run(config)
    (letter,) = dead_letters(folder)
    assert letter["record"] == "0,caf\\xe9"
    assert letter["record_base64"] == "MCxjYWbp"


def test_too_many_dead_letters_stop_the_stage_and_are_kept(configure, run, dead_letters, tmp_path):
    config = configure({"log.csv": b"y,c\n1,a\n0,b\nx,c\n1\n1\n"}, data={"max_dead_fraction": 0.5})
    with pytest.raises(DeadLetterError) as caught:
        run(config)
    assert "3 of 5 records (60.00%) are malformed" in str(caught.value)
    assert "field count 2, label not understood 1" in str(caught.value)
    assert str(tmp_path / "data.dead") in str(caught.value)
    assert [letter["line"] for letter in dead_letters(tmp_path / "data.dead")] == [4, 5, 6]
    assert not (tmp_path / "data").exists()
    run(Config.model_validate(config.to_dict() | {"data": config.to_dict()["data"] | {"max_dead_fraction": 0.6}}))
    assert not (tmp_path / "data.dead").exists()


def test_dead_letters_in_two_workers_stop_the_stage_with_the_same_text(configure, run):
    config = configure({"log.csv": b"y,c\n1,a\n1\n"})
    with pytest.raises(DeadLetterError, match="1 of 2 records"):
        run(config, num_workers=2)


@pytest.mark.parametrize(
    ("content", "settings", "error", "message"),
    [
        (b"y,c\n\n", {}, SourceError, "no records"),
        (b"y,d\n1,a\n", {}, SourceError, "no column 'c'"),
        (
            b"y,c\n1,a\n",
            {"split": {"by": "column", "column": "c", "test": ["a"], "fractions": None}},
            DataError,
            "none of 1 records is in the train split",
        ),
        (b"y,c\n1,a\n", {"split": {"by": "hash", "key": ["k"]}}, SourceError, "no column 'k'"),
    ],
)
def test_input_that_is_no_use_is_refused(content, settings, error, message, configure, run):
    with pytest.raises(error, match=message):
        run(configure({"log.csv": content}, **settings))


def test_a_key_that_no_json_record_has_is_a_missing_column(configure, run):
    with pytest.raises(SourceError, match=r"no record has a column 'c'.*'y'"):
        run(configure({"log.jsonl": b'{"y":1,"d":2}\n'}, data={"format": "jsonl"}))


def test_damage_found_while_reading_is_reported_as_it_is(configure, run):
    packed = gzip.compress(b"y,c\n" + b"1,abcdefghij%d\n" * 9000)
    with pytest.raises(SourceError, match="damaged gzip file"):
        run(configure({"log.csv.gz": packed[:-9]}))


def test_unchanged_data_are_reused_and_changed_ones_are_not(configure, run, tmp_path):
    config = configure({"log.csv": b"y,c\n1,a\n0,b\n"})
    manifest, folder = run(config)
    before = (folder / "manifest.json").stat().st_mtime_ns
    assert run(config)[0] == manifest
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    run(config, reuse=False)
    assert (folder / "manifest.json").stat().st_mtime_ns != before
    (tmp_path / "log.csv").write_bytes(b"y,c\n1,a\n0,b\n1,z\n")
    assert run(config)[0].rows("train") == 3


def test_a_stricter_limit_of_dead_letters_is_not_met_by_reuse(configure, run):
    files = {"log.csv": b"y,c\n1,a\n0,b\nx,c\n"}
    run(configure(files, data={"max_dead_fraction": 0.5}))
    with pytest.raises(DeadLetterError, match="1 of 3 records"):
        run(configure(files, data={"max_dead_fraction": 0.1}))


def test_guesses_about_headers_are_noted(configure, run, tmp_path):
    run(configure({"a.csv": b"y,c\n1,a\n0,b\n", "b.csv": b"1,z\n"}))
    messages = [event["message"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "note"]
    assert messages[0] == f"{tmp_path / 'b.csv'}: no header line; read with the columns of the files before it"


def test_a_damaged_directory_is_made_again(configure, run):
    config = configure({"log.csv": b"y,c\n1,a\n0,b\n"})
    manifest, folder = run(config)
    (folder / manifest.shards[0].file).unlink()
    with pytest.raises(ManifestError, match="missing or of another size"):
        ShardReader.open(folder, "train")
    run(config)
    with ShardReader.open(folder, "train") as reader:
        assert reader.rows == 2


def test_the_key_covers_data_and_nothing_else(configure):
    config = configure({"log.csv": b"y,c\n1,a\n"})

    def key(**sections):
        return preprocess.data_key(configure({"log.csv": sections.pop("content", b"y,c\n1,a\n")}, **sections))

    base = preprocess.data_key(config)
    assert key() == base
    assert key(training={"epochs": 7}, model={"hidden": [3]}, name="other", output={"root": "x"}, embedding={"dim": 3}) == base
    for change in (
        {"content": b"y,c\n1,b\n"},
        {"split": {"salt": "x"}},
        {"schema": {"categorical": [{"name": "d", "column": "c"}]}},
        {"data": {"missing_values": []}},
        {"embedding": {"groups": {"g": ["c"]}}},
        {"evaluation": {"slices": ["c"]}},
    ):
        assert key(**change) != base, change


def test_the_fingerprint_follows_content_only(configure, run):
    files = {"log.csv": b"y,c\n1,a\n0,b\n"}
    one, _ = run(configure(files), "one")
    two, _ = run(configure({"log.csv": b"y,c\r\n1, a\r\n0,b\r\n"}), "two")
    three, _ = run(configure({"log.csv": b"y,c\n1,a\n0,c\n"}), "three")
    assert one.fingerprint == two.fingerprint
    assert one.fingerprint != three.fingerprint
    assert one.feature_digest == three.feature_digest


def test_what_is_no_data_directory_is_not_replaced(configure, run, tmp_path):
    config = configure({"log.csv": b"y,c\n1,a\n"})
    (tmp_path / "data").mkdir()
    run(config)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("precious")
    with pytest.raises(DataError, match=r"not empty and holds no manifest.json"):
        run(config, "thesis")
    with pytest.raises(DataError, match="is a file"):
        run(config, "log.csv")


def test_an_unfinished_directory_is_refused(configure, run):
    _, folder = run(configure({"log.csv": b"y,c\n1,a\n"}))
    (folder / "manifest.json").unlink()
    with pytest.raises(ManifestError, match="not a finished data directory"):
        ShardReader.open(folder, "train")


def test_a_killed_run_leaves_no_directory_and_the_next_one_cleans_up(configure, run, tmp_path):
    config = configure({"log.csv": b"y,c\n1,a\n0,b\n"})
    (tmp_path / "config.json").write_text(config.to_json())
    script = (
        "import sys, time; from pathlib import Path; import training.data.preprocess as p\n"
        "from training.config_file import parse_config; from training.events import EventLog\n"
        "def hang(*a, **k): Path(sys.argv[1], 'ready').touch(); time.sleep(60)\n"
        "p._run = hang\n"
        "folder = Path(sys.argv[1])\n"
        "config = parse_config((folder / 'config.json').read_text())\n"
        "with EventLog(folder / 'e.jsonl') as e: p.preprocess(config, folder / 'data', events=e)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)]) as process:
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "ready").exists() and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.02)
            run(config, "other")
            assert len(list(tmp_path.glob(".data.building-*"))) == 1
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
    assert not (tmp_path / "data").exists()
    assert len(list(tmp_path.glob(".data.building-*"))) == 1
    run(config)
    assert list(tmp_path.glob(".data.building-*")) == []


def in_threads(count, work):
    """``work(i)`` in ``count`` threads that begin together; their results."""
    together = threading.Barrier(count, timeout=60)

    def begin(i):
        together.wait()
        return work(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


def test_one_run_at_a_time_holds_an_outputs_lock_and_nothing_of_it_stays(tmp_path):
    inside, seen = [], []

    def hold(i):
        with EventLog(tmp_path / f"{i}.jsonl") as events:
            for _ in range(50):
                with preprocess._OutputLock(tmp_path / "data", events):
                    inside.append(i)
                    seen.append(list(inside))
                    inside.remove(i)

    in_threads(8, hold)
    assert len(seen) == 400
    assert {len(holders) for holders in seen} == {1}
    assert not (tmp_path / ".data.lock").exists()


@pytest.mark.parametrize("reuse", [True, False])
def test_runs_of_the_same_output_at_once_take_turns(configure, tmp_path, reuse, monkeypatch):
    config, builds, real = configure({"log.csv": b"y,c\n1,a\n0,b\n"}), [], preprocess._run
    monkeypatch.setattr(preprocess, "_run", lambda *args, **kwargs: builds.append(1) or real(*args, **kwargs))

    def make(i):
        with EventLog(tmp_path / f"{i}.jsonl") as events:
            return preprocess.preprocess(config, tmp_path / "data", events=events, reuse=reuse)

    first, second, third = in_threads(3, make)
    assert first == second == third == Manifest.load(tmp_path / "data")
    assert len(builds) == (1 if reuse else 3)
    with ShardReader.open(tmp_path / "data", "train") as reader:
        assert len(reader.read(0, 2)) == 2
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_lock_another_process_holds_is_waited_for(configure, run, tmp_path):
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); sys.stdin.read()"
    )
    config = configure({"log.csv": b"y,c\n1,a\n0,b\n"})
    with (
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / ".data.lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as holder,
        ThreadPoolExecutor(1) as pool,
    ):
        assert holder.stdout.readline() == b"held\n"
        making = pool.submit(run, config)
        deadline = time.monotonic() + 60
        while not any("waiting" in str(event) for event in read_events(tmp_path / "events.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not making.done()
        assert not list(tmp_path.glob(".data.building-*"))
        holder.stdin.close()
        assert making.result(60)[0].rows("train") == 2


def test_a_shard_whose_content_changed_is_not_reused(configure, run):
    config = configure({"log.csv": b"y,c\n1,a\n0,b\n"})
    manifest, folder = run(config)
    path = folder / manifest.shards[0].file
    content = path.read_bytes()
    place = content.index(sign_of("a", "c").to_bytes(8, "little"))
    path.write_bytes(content[:place] + b"\0" + content[place + 1 :])
    os.utime(path, ns=(0, 1))
    with ShardReader.open(folder, "train") as reader, pytest.raises(ManifestError, match="damaged: its content differs"):
        reader.read(0, 2)
    run(config)
    with ShardReader.open(folder, "train") as reader:
        assert reader.read(0, 2).signs[:, 0].tolist() == [sign_of("a", "c"), sign_of("b", "c")]


@pytest.mark.parametrize("step", ["find_cut_points", "fit", "build_manifest"])
def test_an_error_in_a_step_that_runs_once_is_reported_as_it_is(two_files, run, monkeypatch, step):
    def refuse(*args, **kwargs):
        raise DataError(f"{step} refuses: do something else")

    monkeypatch.setattr(beam_steps, step, refuse)
    with pytest.raises(DataError) as caught:
        run(two_files)
    assert str(caught.value) == f"{step} refuses: do something else"


def test_numbers_beyond_float32_are_dead_letters(configure, run, dead_letters):
    values = ["1e39", "-1e155", "3.4028235e38", "-3.4e38", "1", "", "1e999"]
    content = "y,c,x\n" + "".join(f"1,a,{value}\n" for value in values)
    dense = [{"name": "x"}, {"name": "x2", "column": "x", "transforms": ["standardise"]}]
    schema = {"dense": dense, "categorical": [{"name": "c"}]}
    manifest, folder = run(configure({"log.csv": content.encode()}, data={"max_dead_fraction": 0.5}, schema=schema))
    assert manifest.dead == {"number not finite": 3}
    letters = dead_letters(folder)
    assert [(letter["line"], letter["reason"]) for letter in letters] == [(line, "number not finite") for line in (2, 3, 8)]
    assert letters[0]["detail"] == "x: '1e39' is beyond the float32 range (3.4e38)"
    statistics = manifest.splits["train"].dense["x"]
    assert (statistics.rows, statistics.max, statistics.missing) == (4, 3.4028235e38, 1)
    assert np.isfinite([statistics.mean, statistics.std]).all()
    with ShardReader.open(folder, "train") as reader:
        assert np.isfinite(reader.read(0, 4).dense).all()


def test_a_bucket_takes_numbers_of_any_size(configure, run):
    categorical = [{"name": "c"}, {"name": "b", "column": "x", "bucketise": {"boundaries": [0.0, 1e100]}}]
    manifest, _ = run(configure({"log.csv": b"y,c,x\n1,a,1e155\n0,a,1\n"}, schema={"categorical": categorical}))
    assert manifest.dead == {}
    assert manifest.splits["train"].slots["b"].top == [("1", 1), ("2", 1)]


@pytest.mark.parametrize("transforms", [["standardise"], ["log1p", "standardise"]])
def test_numbers_that_standardise_carries_beyond_float32_are_dead_letters(configure, run, dead_letters, transforms):
    train = "".join(f"1,train,{i % 2}e-42,a\n" for i in range(4))
    content = f"y,fold,x,c\n{train}0,test,1e38,a\n0,test,,a\n0,test,1e-42,a\n"
    split = {"by": "column", "column": "fold", "fractions": None}
    schema = {"dense": [{"name": "x", "transforms": transforms}], "categorical": [{"name": "c"}]}
    manifest, folder = run(configure({"log.csv": content.encode()}, data={"max_dead_fraction": 0.5}, schema=schema, split=split))
    (letter,) = dead_letters(folder)
    assert (letter["line"], letter["reason"]) == (6, "number not finite")
    assert letter["detail"] == f"x: '1e38' is beyond the float32 range (3.4e38) after {' and '.join(transforms)}"
    assert manifest.rows("test") == 2
    with ShardReader.open(folder, "test") as reader:
        assert np.isfinite(reader.read(0, 2).dense).all()


def test_progress_and_oddities_are_events(configure, run, tmp_path):
    run(configure({"log.csv": b"y,c\n1,a\n1,b\nx,b\n"}, data={"max_dead_fraction": 0.5}))
    seen = read_events(tmp_path / "events.jsonl")
    progress = [event for event in seen if event["kind"] == "progress"]
    assert progress[-1]["done"] == progress[-1]["total"] == 16
    assert [event["message"] for event in seen if event["kind"] == "note"] == [
        "all 2 labels of the train split are 1",
        "the valid split is empty",
        "the test split is empty",
        "1 malformed records are in dead/: label not understood 1",
    ]


def test_work_files_do_not_reach_the_data_directory(configure, run):
    _, folder = run(configure({"log.csv": b"y,c\n1,a\n"}))
    assert sorted(path.name for path in folder.iterdir()) == ["dead", "ids", "manifest.json", "test", "train", "valid"]
    assert pieces.WorkFolder(folder).piece((0, 0, 0), 0).parent.exists() is False


EXAMPLE = Path(__file__).parents[3] / "examples" / "adult" / "satrap.yaml"


def test_the_adult_example_has_the_published_counts(tmp_path):
    with EventLog(tmp_path / "events.jsonl") as events:
        preprocess.preprocess(load_config(EXAMPLE), tmp_path / "data", events=events)
    manifest = Manifest.load(tmp_path / "data")
    train, valid, test = (manifest.splits[name] for name in ("train", "valid", "test"))
    assert (train.rows + valid.rows, train.positives + valid.positives) == (32_561, 7_841)
    assert (test.rows, test.positives) == (16_281, 3_846)
    assert valid.rows == pytest.approx(0.05 * 32_561, rel=0.1)
    assert manifest.dead == {}
    assert {name: slot.distinct for name, slot in train.slots.items()} == {
        "workclass": 9,
        "education": 16,
        "marital_status": 7,
        "occupation": 15,
        "relationship": 6,
        "race": 5,
        "gender": 2,
        "native_country": 42,
    }
