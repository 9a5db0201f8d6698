"""Small logs: write files, preprocess them, look at what came out."""

import json
from pathlib import Path

import pytest

from training.config import Config
from training.data.preprocess import preprocess
from training.data.raw import Wanted
from training.data.records import RecordParser
from training.data.sources import find_files, open_sources, plan_chunks, read_chunk
from training.events import EventLog

MINIMAL = {
    "name": "small",
    "data": {"paths": [], "format": "csv"},
    "schema": {"label": {"column": "y"}, "categorical": [{"name": "c"}]},
    "split": {"by": "hash", "fractions": {"train": 1.0, "valid": 0.0, "test": 0.0}},
}


def merged(base, over):
    """``base`` with the nested keys of ``over`` put in."""
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return base | {key: merged(base.get(key), value) for key, value in over.items()}


@pytest.fixture
def configure(tmp_path):
    """``configure({file: bytes}, **sections)``: write the files and make a configuration that reads them."""

    def build(files, **sections):
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        tree = merged(MINIMAL, sections)
        if not tree["data"]["paths"]:
            tree["data"] = tree["data"] | {"paths": [str(tmp_path / name) for name in files]}
        return Config.model_validate(tree)

    return build


@pytest.fixture
def run(tmp_path):
    """``run(config, name="data", **options)``: preprocess into a folder of that name; returns (manifest, folder)."""

    def build(config, name="data", **options):
        with EventLog(tmp_path / "events.jsonl") as events:
            return preprocess(config, tmp_path / name, events=events, **options), tmp_path / name

    return build


@pytest.fixture
def parse():
    """``parse(config)``: every well-formed record as (label, time, numbers, ids) and every dead letter as (file, line, reason)."""

    def build(config):
        wanted = Wanted.by(config)
        parser = RecordParser(config)
        good, dead = [], []
        for file in open_sources(find_files(config.data.paths), config.data, wanted):
            for chunk in plan_chunks(file, config.data):
                for raw in read_chunk(chunk, config.data, wanted):
                    records, letters = parser.parse(raw, file.path)
                    good += [_shown(records, config, row) for row in range(len(records))]
                    dead += [(Path(letter.file).name, letter.line, letter.reason) for letter in letters]
        return good, dead

    return build


def _shown(records, config, row):
    values = [int(records.label[row])]
    if records.time is not None:
        values.append(int(records.time[row]))
    for feature in config.schema_.dense:
        number = float(records.numbers[feature.name][row])
        values.append(None if number != number else number)
    for feature in config.schema_.categorical:
        if feature.bucketise:
            continue
        if feature.multi_valued:
            lists = records.lists[feature.name]
            values.append([lists.values.text(i) for i in range(lists.offsets[row], lists.offsets[row + 1])])
        else:
            column = records.texts[feature.name]
            values.append(None if column.missing[row] else column.text(row))
    return tuple(values)


@pytest.fixture
def dead_letters():
    """All dead letters of a data directory, in file and line order."""

    def build(folder):
        paths = sorted((folder / "dead").glob("*.jsonl")) if (folder / "dead").is_dir() else sorted(folder.glob("*.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    return build
