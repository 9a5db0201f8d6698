"""Synthetic clicks shaped like Criteo's: a known model draws the labels, so the best possible AUC is known too.

Tab-separated, no header: a label, integers with blanks and -1, ids of eight hex digits with Zipf frequencies. The logit is
``bias + sum of w_j * x_j over dense + sum of an effect per id``, where x_j is the standardised sign(v)*log(1+|v|); a missing value
adds nothing. Equal arguments give equal files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import yaml

from training.data.dead_letters import Reason

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_BATCH_ROWS = 50_000
_LOG_MEAN, _LOG_STD = 1.5, 1.2
_DENSE_SD, _ID_SD = 0.6, 1.2
"""Standard deviation of the logit's dense part and of its id part (for equally frequent ids)."""
_BIAS = -1.1

_Breaker = Callable[[list[bytes], int], list[bytes]]


def _replaced(fields: list[bytes], place: int, text: bytes) -> list[bytes]:
    return [*fields[:place], text, *fields[place + 1 :]]


_KINDS: dict[str, tuple[Reason, bool, _Breaker]] = {
    "field missing": ("field count", False, lambda fields, _: fields[:-1]),
    "field too many": ("field count", False, lambda fields, _: [*fields, b"x"]),
    "label no number": ("label not understood", False, lambda fields, _: _replaced(fields, 0, b"yes")),
    "label missing": ("label missing", False, lambda fields, _: _replaced(fields, 0, b"")),
    "id undecodable": ("undecodable", False, lambda fields, _: _replaced(fields, len(fields) - 1, b"\xff\xfe0000")),
    "number with letters": ("number not understood", True, lambda fields, dense: _replaced(fields, dense, b"12a")),
    "number infinite": ("number not finite", True, lambda fields, dense: _replaced(fields, dense, b"-inf")),
}
"""Kinds of malformed records: the reason their dead letter gives, whether they need a dense feature, and how they are made."""


@dataclass(frozen=True)
class SynthTruth:
    """What is known about the clicks; ``truth.json`` holds the same."""

    rows: int
    """Records, malformed ones included."""
    positives: int
    """Among the well-formed records."""
    bayes_auc: float
    """Expected AUC of the true probabilities over these records: no model can be better but by chance."""
    bayes_log_loss: float
    malformed_kinds: dict[str, int]
    malformed_reasons: dict[str, int]
    """The same by the reason of their dead letters."""
    bias: float
    dense_weights: list[float]
    seed: int


def synth(  # noqa: PLR0913 - one argument per property of the data
    output: Path,
    *,
    rows: int,
    seed: int,
    malformed: float,
    missing: float,
    alpha: float,
    slots: int = 26,
    dense: int = 13,
    ids_per_slot: int,
) -> SynthTruth:
    """Write ``clicks.tsv``, ``truth.json`` and ``satrap.yaml`` into the folder ``output``, and return the truth.

    ``malformed``: share of records made unreadable, in equal parts of every kind; ``missing``: share of values left out;
    ``alpha``: exponent of the Zipf law, 0 is uniform; ``dense``, ``slots``: number of features; ``ids_per_slot``: distinct ids.
    """
    output.mkdir(parents=True, exist_ok=True)
    rng = np.random.Generator(np.random.PCG64(seed))
    model = _Model.draw(rng, slots=slots, dense=dense, ids_per_slot=ids_per_slot, alpha=alpha)
    kinds = _malformed_kinds(rng, rows, round(rows * malformed), has_dense=dense > 0)
    logits, labels = np.empty(rows), np.empty(rows, np.int8)
    with (output / "clicks.tsv").open("wb") as file:
        for start in range(0, rows, _BATCH_ROWS):
            stop = min(start + _BATCH_ROWS, rows)
            table, logits[start:stop], labels[start:stop] = model.records(rng, stop - start, missing)
            file.write(_break(_tsv(table), {row - start: kind for row, kind in kinds.items() if start <= row < stop}, dense))
    good = np.ones(rows, np.bool_)
    good[list(kinds)] = False
    auc, log_loss = bayes_metrics(logits[good])
    by_kind = Counter(kinds.values())
    by_reason: Counter[str] = Counter(_KINDS[kind][0] for kind in kinds.values())
    truth = SynthTruth(
        rows, int(labels[good].sum()), auc, log_loss, dict(by_kind), dict(by_reason), _BIAS, [float(w) for w in model.weights], seed
    )
    (output / "truth.json").write_text(json.dumps(asdict(truth), indent=1, sort_keys=True) + "\n")
    config = _config(slots=slots, dense=dense, ids_per_slot=ids_per_slot, malformed=malformed)
    (output / "satrap.yaml").write_text(
        "# Made by `satrap synth`; truth.json holds the best possible metrics.\n" + yaml.safe_dump(config, sort_keys=False)
    )
    return truth


def bayes_metrics(logits: F64) -> tuple[float, float]:
    """Expected AUC and log loss of true logits [N] over all labels they may draw."""
    ordered = np.sort(logits)
    chance = 1.0 / (1.0 + np.exp(-ordered))
    below = np.cumsum(1.0 - chance) - (1.0 - chance)
    auc = float((chance * below).sum() / (chance.sum() * (1.0 - chance).sum() - (chance * (1.0 - chance)).sum()))
    entropy = np.logaddexp(0.0, -ordered) * chance + np.logaddexp(0.0, ordered) * (1.0 - chance)
    return auc, float(entropy.mean())


@dataclass(frozen=True)
class _Model:
    """The true model and the law of the features."""

    weights: F64
    """[D]."""
    effects: F64
    """[S, ids_per_slot], by the rank of the id."""
    cumulated: F64
    """[ids_per_slot]: share of ids up to each rank."""
    scrambles: npt.NDArray[np.uint32]
    """[S]: makes the hex text of a rank differ between slots."""

    @classmethod
    def draw(cls, rng: np.random.Generator, *, slots: int, dense: int, ids_per_slot: int, alpha: float) -> _Model:
        weights = rng.standard_normal(dense) * (_DENSE_SD / np.sqrt(max(dense, 1)))
        effects = rng.standard_normal((slots, ids_per_slot)) * (_ID_SD / np.sqrt(slots))
        frequency = np.arange(1, ids_per_slot + 1, dtype=np.float64) ** -alpha
        scrambles = rng.integers(0, 2**32, slots, dtype=np.uint32)
        return cls(weights, effects, np.cumsum(frequency) / frequency.sum(), scrambles)

    def records(self, rng: np.random.Generator, rows: int, missing: float) -> tuple[pa.Table, F64, npt.NDArray[np.int8]]:
        """(columns as they are written, true logits, labels) of new records."""
        logits = np.full(rows, _BIAS)
        arrays: list[pa.Array] = []
        for weight in self.weights:
            values = np.floor(np.expm1(_LOG_MEAN + _LOG_STD * rng.standard_normal(rows)))
            absent = rng.random(rows) < missing
            logits += np.where(absent, 0.0, weight * (np.copysign(np.log1p(np.abs(values)), values) - _LOG_MEAN) / _LOG_STD)
            arrays.append(pa.array(values.astype(np.int64), mask=absent))
        for effects, scramble in zip(self.effects, self.scrambles, strict=True):
            ranks = np.minimum(np.searchsorted(self.cumulated, rng.random(rows), side="right"), len(self.cumulated) - 1)
            absent = rng.random(rows) < missing
            logits += np.where(absent, 0.0, effects[ranks])
            arrays.append(_hex_texts(ranks.astype(np.uint32) * np.uint32(2_654_435_761) + scramble, absent))
        labels = (rng.random(rows) < 1.0 / (1.0 + np.exp(-logits))).astype(np.int8)
        arrays.insert(0, pa.array(labels))
        return pa.table(arrays, names=_columns(len(self.weights), len(self.effects))), logits, labels


def _columns(dense: int, slots: int) -> list[str]:
    return ["label", *(f"I{i}" for i in range(1, dense + 1)), *(f"C{i}" for i in range(1, slots + 1))]


def _hex_texts(numbers: npt.NDArray[np.uint32], absent: npt.NDArray[np.bool_]) -> pa.Array:
    """Eight hex digits per number; null where ``absent``."""
    shifts = np.arange(28, -1, -4, dtype=np.uint32)
    nibbles = (numbers[:, None] >> shifts[None, :]) & np.uint32(15)
    content = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles]
    offsets = np.arange(0, 8 * len(numbers) + 1, 8, dtype=np.int32)
    texts = pa.StringArray.from_buffers(len(numbers), pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(content)))
    return pa.compute.if_else(pa.array(absent), pa.scalar(None, pa.string()), texts)


def _tsv(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pyarrow.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pyarrow.csv.write_csv(table, sink, options)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _malformed_kinds(rng: np.random.Generator, rows: int, count: int, *, has_dense: bool) -> dict[int, str]:
    """The records to be made malformed, and how."""
    names = [name for name, (_, needs_dense, _) in _KINDS.items() if has_dense or not needs_dense]
    chosen = np.sort(rng.choice(rows, count, replace=False)).tolist()
    return {row: names[i % len(names)] for i, row in enumerate(chosen)}


def _break(text: bytes, kinds: dict[int, str], dense: int) -> bytes:
    """Make the lines of ``kinds`` malformed."""
    if not kinds:
        return text
    lines = text.split(b"\n")
    for row, kind in kinds.items():
        lines[row] = b"\t".join(_KINDS[kind][2](lines[row].split(b"\t"), dense))
    return b"\n".join(lines)


def _config(*, slots: int, dense: int, ids_per_slot: int, malformed: float) -> dict[str, Any]:
    columns = _columns(dense, slots)
    return {
        "name": "synth",
        "data": {
            "paths": ["clicks.tsv"],
            "format": "tsv",
            "header": False,
            "columns": columns,
            "quoting": False,
            "max_dead_fraction": min(1.0, max(0.01, 1.5 * malformed)),
        },
        "schema": {
            "label": {"column": "label"},
            "dense": [{"name": name, "transforms": ["log1p", "standardise"]} for name in columns[1 : 1 + dense]],
            "categorical": [{"name": name} for name in columns[1 + dense :]],
        },
        "split": {"by": "hash", "fractions": {"train": 0.8, "valid": 0.1, "test": 0.1}},
        "embedding": {
            "dim": 8,
            "capacity_rows": max(64, int(1.25 * slots * (ids_per_slot + 1))),
            "optimizer": {"name": "adagrad", "learning_rate": 0.02},
        },
        "model": {"name": "deepfm", "hidden": [64, 32]},
        "training": {"mode": "hybrid", "batch_size": 512, "epochs": 1, "roles": {"parameter_server": 2}},
    }
