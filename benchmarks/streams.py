"""The ids that all contenders see, and data directories for the trainer made straight from them. Needs numpy only, but for the shards.

A row number is an id of a contender that is told where its rows lie; our sign of it is ``signs_of(row)``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNDO = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
NUM_SLOTS, NUM_DENSE = 26, 13


def signs_of(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """64-bit signs, all different; never 0."""
    return (rows.astype(np.uint64) + np.uint64(1)) * GOLDEN


def rows_of(signs: npt.NDArray[np.uint64]) -> I64:
    """The inverse of ``signs_of``."""
    return (signs * _UNDO - np.uint64(1)).astype(np.int64)


def gradients_of(rows: I64, dim: int) -> npt.NDArray[np.float32]:
    """A gradient per row number, the same for every contender: float32 [n, dim] in [-0.5, 0.5)."""
    phase = (rows % 4093).astype(np.float32)[:, None] * np.float32(0.6180339)
    across = np.arange(1, dim + 1, dtype=np.float32) * np.float32(0.4142135)
    return np.ascontiguousarray((phase + across) % np.float32(1.0) - np.float32(0.5))


def draw(rng: np.random.Generator, ids: int, count: int, alpha: float) -> I64:
    """``count`` of ``ids`` ids: uniform for alpha 0, else by the Zipf law (inverse of its continuous form), ids scattered."""
    uniform = rng.random(count)
    if alpha == 0.0:
        return np.minimum((uniform * ids).astype(np.int64), ids - 1)
    power = 1.0 - alpha
    ranks = np.minimum(((1.0 + uniform * ((ids + 1.0) ** power - 1.0)) ** (1.0 / power)).astype(np.int64) - 1, ids - 1)
    step = 2_654_435_761
    while np.gcd(step, ids) != 1:
        step += 2
    return (ranks * step + 12_345) % ids


def distinct(rng: np.random.Generator, ids: int, count: int, alpha: float) -> I64:
    """``count`` different ids in the order of their first occurrence."""
    seen: I64 = np.empty(0, np.int64)
    draws = count
    while len(seen) < count:
        drawn = np.concatenate([seen, draw(rng, ids, draws, alpha)])
        seen = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
        draws *= 2
    return seen[:count]


def clicks(rng: np.random.Generator, records: int, ids_per_slot: int, alpha: float) -> tuple[I64, npt.NDArray[np.float32], I64]:
    """Row numbers [N, 26] over all slots, dense [N, 13] and labels [N] of a planted model."""
    rows = np.stack([draw(rng, ids_per_slot, records, alpha) + slot * ids_per_slot for slot in range(NUM_SLOTS)], axis=1)
    dense = rng.standard_normal((records, NUM_DENSE)).astype(np.float32)
    effects = ((signs_of(rows) >> np.uint64(40)).astype(np.float32) / 2**23 - 1.0) * 0.4
    logits = effects.sum(axis=1) + dense @ np.linspace(-0.3, 0.3, NUM_DENSE, dtype=np.float32) - 1.0
    labels = (rng.random(records) < 1.0 / (1.0 + np.exp(-logits))).astype(np.int64)
    return rows, dense, labels


def write_data(folder: Path, *, records: int, ids_per_slot: int, alpha: float, seed: int = 0) -> None:
    """A data directory as preprocess leaves it, and the same records as arrays for the peers."""
    from training.data.manifest import FORMAT_VERSION, Manifest, ShardEntry, SlotTransform, SplitStatistics
    from training.data.manifest import DenseTransform as Dense
    from training.data.shards import SHARD_ROWS, ShardColumns, write_shard

    rows, dense, labels = clicks(np.random.default_rng(seed), records, ids_per_slot, alpha)
    (folder / "train").mkdir(parents=True)
    for name, array in (("rows", rows), ("dense", dense), ("label", labels.astype(np.float32))):
        np.save(folder / f"{name}.npy", array)
    shards = []
    for number, start in enumerate(range(0, records, SHARD_ROWS)):
        part = slice(start, start + SHARD_ROWS)
        columns = ShardColumns(labels[part].astype(np.int8), None, dense[part], signs_of(rows[part]), {}, {})
        path = folder / "train" / f"part-{number:05}.arrow"
        digest = write_shard(path, columns)
        size = path.stat().st_size
        shards.append(ShardEntry(file=f"train/{path.name}", split="train", rows=len(columns), bytes=size, digest=digest))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        name="bench",
        fingerprint=f"bench-{seed}",
        feature_digest="bench",
        sources=[],
        dense=[Dense(name=name, fill=0.0, transforms=[], mean=0.0, std=1.0) for name in _names("I", NUM_DENSE)],
        slots=[SlotTransform(name=name, group=name, hash_seed=0) for name in _names("C", NUM_SLOTS)],
        slice_columns=[],
        shards=shards,
        splits={"train": SplitStatistics(rows=records, positives=int(labels.sum()), dense={}, slots={})},
        dead={},
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())


def settings(*, rows: int, dim: int = 16, small: bool = False, **training: Any) -> dict[str, Any]:
    """A run's configuration: DLRM over 13 dense features and 26 slots, row-wise Adagrad on rows, Adam on the dense network."""
    return {
        "name": "bench",
        "data": {"paths": ["unused.tsv"], "format": "tsv", "header": True},
        "schema": {
            "label": {"column": "label"},
            "dense": [{"name": name} for name in _names("I", NUM_DENSE)],
            "categorical": [{"name": name} for name in _names("C", NUM_SLOTS)],
        },
        "split": {"by": "hash"},
        "embedding": {
            "dim": dim,
            "capacity_rows": rows,
            "optimizer": {"name": "rowwise_adagrad", "learning_rate": 0.02},
        },
        "model": {"name": "dlrm", "hidden": [64] if small else [512, 256], "bottom_hidden": [64] if small else [512, 256]},
        "training": {"batch_size": 4096, "epochs": 1000, "log_every_steps": 1_000_000, **training},
    }


def _names(letter: str, count: int) -> list[str]:
    return [f"{letter}{i}" for i in range(1, count + 1)]
