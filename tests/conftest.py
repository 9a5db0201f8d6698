"""A small click log, preprocessed once, for whatever trains or scores."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from training.config_file import load_config
from training.events import EventLog

ROWS = 1200


def write_clicks(folder: Path, *, rows: int = ROWS, seed: int = 3) -> Path:
    """A csv with two dense columns, two ids, a tag list and a label that depends on them; returns the path of its satrap.yaml."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers(0, 40, rows), rng.zipf(1.3, rows) % 30
    tags = ["|".join(f"t{t}" for t in rng.integers(0, 12, rng.integers(0, 4))) for _ in range(rows)]
    price, age = rng.normal(10, 3, rows), rng.integers(0, 90, rows)
    logit = 1.5 * rng.standard_normal(40)[user] + 1.5 * rng.standard_normal(30)[item] + 0.2 * (price - 10)
    click = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(int)
    lines = ["user,item,tags,price,age,click"]
    lines += [f"u{u},i{i},{t},{p:.4f},{a},{c}" for u, i, t, p, a, c in zip(user, item, tags, price, age, click, strict=True)]
    (folder / "clicks.csv").write_text("\n".join(lines) + "\n")
    config = {
        "name": "clicks",
        "data": {"paths": ["clicks.csv"], "format": "csv"},
        "schema": {
            "label": {"column": "click"},
            "dense": [{"name": "price", "transforms": ["standardise"]}, {"name": "age", "transforms": ["log1p", "standardise"]}],
            "categorical": [{"name": "user"}, {"name": "tags", "separator": "|", "pooling": "mean"}, {"name": "item"}],
        },
        "split": {"by": "hash", "fractions": {"train": 0.7, "valid": 0.15, "test": 0.15}},
        "embedding": {
            "dim": 4,
            "capacity_rows": 1000,
            "initializer": {"kind": "normal", "scale": 0.1},
            "optimizer": {"learning_rate": 0.1},
        },
        "model": {"name": "dnn", "hidden": [16, 8]},
        "training": {
            "mode": "sync",
            "batch_size": 64,
            "epochs": 2,
            "dense_optimizer": {"learning_rate": 0.01},
            "wire_dtype": "float32",
            "roles": {"parameter_server": 2},
            "request_timeout_seconds": 30.0,
        },
        "output": {"root": str(folder / "runs")},
    }
    path = folder / "satrap.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def clicks_yaml(tmp_path_factory):
    """Path of the small log's configuration."""
    return write_clicks(tmp_path_factory.mktemp("clicks"))


@pytest.fixture(scope="session")
def clicks_data(clicks_yaml, tmp_path_factory):
    """Data directory of the small log."""
    from training.data.preprocess import preprocess

    folder = tmp_path_factory.mktemp("data")
    with EventLog(folder / "events.jsonl") as events:
        preprocess(load_config(clicks_yaml), folder / "data", events=events)
    return folder / "data"


@pytest.fixture
def configured(clicks_yaml):
    """``configured("training.epochs=1", ...)``: the small log's configuration with overrides."""
    return lambda *overrides: load_config(clicks_yaml, overrides)


@pytest.fixture
def events(tmp_path):
    """An open event log."""
    with EventLog(tmp_path / "events.jsonl") as log:
        yield log
