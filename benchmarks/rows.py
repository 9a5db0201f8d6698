"""Rows by sign against rows at known places: look-up, update, insertion at capacity, memory.

Every contender is a process; they take turns within each round on the same ids, and ratios are taken round by round. Seconds are CPU time
for one thread, wall time for several. Known rows come to the peers both as the ids arrive and sorted; the limit has them sorted.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from benchmarks.contenders import Contender, ContenderError, peers_python
from benchmarks.results import Result, Row
from benchmarks.streams import NUM_SLOTS, distinct, draw

BATCH, BATCHES = 100_000, 11
"""Each batch is used once per request: ten timed calls after one that warms up, so its rows are not in a cache from the last use."""
M = 1e6


@dataclass(frozen=True)
class Case:
    """One size of table and kind of stream."""

    rows: int
    dim: int = 16
    optimizer: str = "rowwise_adagrad"
    alpha: float = 0.0
    threads: int = 1
    batch: int = BATCH

    @property
    def text(self) -> str:
        stream = f"Zipf {self.alpha:g}" if self.alpha else "uniform"
        threads = f", {self.threads} threads" if self.threads > 1 else ""
        return f"dim {self.dim}, {self.rows:.0e} rows, {stream}{threads}".replace("e+0", "e")


LOOKUPS = {
    "quick": [Case(20_000, batch=5_000)],
    "default": [
        *(Case(rows, dim) for rows, dim in ((10**6, 16), (10**6, 32), (10**6, 64), (10**6, 128), (10**7, 16), (4 * 10**6, 64))),
        *(Case(rows, alpha=1.05) for rows in (10**6, 10**7)),
        *(Case(10**7, alpha=alpha, threads=2) for alpha in (0.0, 1.05)),
    ],
}
LOOKUPS["full"] = [*LOOKUPS["default"], *(Case(10**8, alpha=alpha, threads=threads) for alpha in (0.0, 1.05) for threads in (1, 2))]
UPDATES = {
    "quick": [Case(20_000, batch=5_000), Case(20_000, optimizer="adam", batch=5_000)],
    "default": [
        Case(10**6),
        Case(10**7),
        Case(10**7, alpha=1.05),
        Case(10**6, 64),
        Case(10**6, optimizer="adagrad"),
        Case(5 * 10**6, optimizer="adagrad"),
        Case(10**6, optimizer="adam"),
        Case(3 * 10**6, optimizer="adam"),
        Case(10**7, threads=2),
    ],
}
UPDATES["full"] = [*UPDATES["default"], Case(10**8)]
LARGE_BYTES = 5 << 30
"""Tables beyond this do not lie in memory beside those of the peers: contenders then come one after another."""


def measure(size: str) -> Result:
    """All row benchmarks of a size: quick, default or full."""
    result = Result("rows", size=size)
    rounds, calls = (2, 2) if size == "quick" else (5, 10)
    sizes = {"quick": [20_000], "default": [10**6], "full": [10**6, 10**7]}[size]
    with tempfile.TemporaryDirectory() as folder, _Field(result, Path(folder)) as field:
        for case in LOOKUPS[size]:
            _lookups(field, case, rounds, calls)
        for case in UPDATES[size]:
            _updates(field, case, rounds, calls)
        _occurrences(field, Case(20_000, alpha=1.05, batch=1_000) if size == "quick" else Case(10**7, alpha=1.05), rounds, calls)
        for rows in sizes:
            _evictions(field, rows, rounds, calls)
    for rows in sizes:
        _memory(result, rows)
    return result


def _lookups(field: _Field, case: Case, rounds: int, calls: int) -> None:
    asks = {
        "ours": ("own", "lookup", {"insert": False}),
        "training": ("own", "lookup", {"insert": True}),
        "limit": ("own", "limit_lookup", {}),
        "torch": ("torch", "lookup", {"order": "sorted"}),
        "torch given": ("torch", "lookup", {"order": "given"}),
        "fbgemm": ("fbgemm", "lookup", {"order": "given"}),
        "fbgemm sorted": ("fbgemm", "lookup", {"order": "sorted"}),
    }
    rates = _rates(field, case, asks, rounds, calls)
    unit, section = "M rows/s", "look-up"

    def add(what: str, ours: str, against: str, key: str, goal: float | None = None) -> None:
        if key in rates:
            pair = (rates[ours], rates[key])
            field.result.rows.append(Row.rates(section, f"{what}, {case.text}", against, unit, pair, goal=goal))

    add("look-up by sign", "ours", "FBGEMM TBE, known rows, ids as they come", "fbgemm", 2.0)
    add("look-up by sign", "ours", "FBGEMM TBE, known rows, sorted for it", "fbgemm sorted")
    add("look-up by sign", "ours", "torch.index_select, known rows, sorted for it", "torch", 1.2)
    add("look-up by sign", "ours", "torch.index_select, known rows, ids as they come", "torch given")
    add("look-up by sign", "ours", "limit: prefetching gather of known rows, sorted", "limit", 0.5)
    add("look-up of training (refreshes recency)", "training", "look-up by sign that changes nothing", "ours")
    if case.rows == 10**8 and case.threads == 1:
        fixed = [25.0] * len(rates["ours"])
        field.result.rows.append(Row.rates(section, f"look-up by sign, {case.text}", "25 M rows/s", unit, (rates["ours"], fixed), goal=1.0))


def _updates(field: _Field, case: Case, rounds: int, calls: int) -> None:
    asks: dict[str, tuple[str, str, dict[str, Any]]] = {
        "ours": ("own", "update", {}),
        "limit": ("own", "limit_update", {}),
        "fbgemm": ("fbgemm", "update", {"order": "given"}),
        "fbgemm sorted": ("fbgemm", "update", {"order": "sorted"}),
        "torch": ("torch", "update", {"order": "sorted"}),
    }
    if case.optimizer == "rowwise_adagrad":
        del asks["torch"]
    else:
        del asks["fbgemm"], asks["fbgemm sorted"]
    rates = _rates(field, case, asks, rounds, calls)
    name = {"rowwise_adagrad": "row-wise Adagrad", "adagrad": "Adagrad", "adam": "Adam"}[case.optimizer]
    torch_name = "torch SparseAdam" if case.optimizer == "adam" else "torch sparse Adagrad"
    goals = {
        "fbgemm": ("FBGEMM fused row-wise Adagrad (backward alone), ids as they come", 4.0),
        "fbgemm sorted": ("FBGEMM fused row-wise Adagrad (backward alone), sorted for it", None),
        "torch": (f"{torch_name} (backward and step), sorted for it", 4.0),
        "limit": ("limit: prefetching update of known rows, sorted", 0.7),
    }
    for key, (against, goal) in goals.items():
        if key in rates:
            pair = (rates["ours"], rates[key])
            field.result.rows.append(Row.rates("update", f"update by sign, {name}, {case.text}", against, "M rows/s", pair, goal=goal))


def _occurrences(field: _Field, case: Case, rounds: int, calls: int) -> None:
    """Batches of 4096 x 26 ids with their repeats: what a worker and a server do together."""
    rng = np.random.default_rng(3)
    per_slot = case.rows // NUM_SLOTS
    records = 4096 if case.rows > 10**5 else 256
    path = field.folder / "occurrences.npy"
    ids = draw(rng, per_slot, BATCHES * records * NUM_SLOTS, case.alpha).reshape(BATCHES, records, NUM_SLOTS)
    np.save(path, (ids + np.arange(NUM_SLOTS) * per_slot).reshape(BATCHES, -1))
    rates: dict[str, dict[str, list[float]]] = {}
    contenders = field.opened(case, {"own", "fbgemm", "torch"})
    for _ in range(rounds):
        for name, contender in contenders.items():
            answer = contender.ask("occurrences", calls=calls, path=str(path))
            for part in ("forward", "backward"):
                seconds = float(np.median(answer[part]["cpu"]))
                rates.setdefault(name, {}).setdefault(part, []).append(records * NUM_SLOTS / M / seconds)
            if name == "own":
                field.result.figures["unique_share"] = answer["unique"] / (records * NUM_SLOTS)
    texts = {
        "fbgemm": ("FBGEMM TBE forward", "FBGEMM TBE backward with fused row-wise Adagrad"),
        "torch": ("torch.index_select", "torch sparse backward with (element-wise) Adagrad"),
    }
    for name, both in texts.items():
        for part, what, against in zip(("forward", "backward"), ("dedup + look-up + expand", "sum + update"), both, strict=True):
            if name in rates:
                row = Row.rates(
                    "occurrences",
                    f"{what} of a batch of {records} x {NUM_SLOTS} ids, {case.text}",
                    against,
                    "M ids/s",
                    (rates["own"][part], rates[name][part]),
                )
                field.result.rows.append(row)


def _evictions(field: _Field, rows: int, rounds: int, calls: int) -> None:
    case = Case(rows, batch=min(BATCH, rows // 4))
    size = rows // 50
    rates: dict[str, list[float]] = {"room": [], "full": []}
    own = field.opened(case, {"own"})["own"]
    for _ in range(rounds):
        answer = own.ask("evict", calls=calls, size=size)
        for kind, values in rates.items():
            values.append(size / M / float(np.median(answer[kind]["cpu"])))
        if answer["evicted"] < 0.99 * size * calls:
            raise ContenderError(f"a full table evicted only {answer['evicted']} rows for {size * calls} new ones")
    what = f"insert by evicting at capacity, {case.text}"
    pair = (rates["full"], rates["room"])
    field.result.rows.append(Row.rates("evict", what, "insert into a table with room", "M rows/s", pair, goal=0.5))


def _memory(result: Result, rows: int) -> None:
    figures = []
    kinds = [(16, "rowwise_adagrad", 4), (16, "adagrad", 64), (16, "adam", 132), (64, "rowwise_adagrad", 4)]
    for dim, optimizer, state in kinds[: 1 if rows < 10**6 else None]:
        for load in (0.9, 1.0):
            with Contender.start("own", "benchmarks.own_rows") as own:
                answer = own.ask("memory", rows=rows, dim=dim, optimizer=optimizer, load=load)
            payload = 4 * dim + state
            figures.append(
                {
                    **answer,
                    "capacity": rows,
                    "dim": dim,
                    "optimizer": optimizer,
                    "load": load,
                    "payload": payload,
                    "index_bytes": (answer["stated"] - answer["slots"] * payload) / answer["rows"],
                    "all_bytes": answer["stated"] / answer["rows"] - payload,
                    "lost": 1.0 - answer["rows"] / answer["offered"],
                    "resident_ratio": answer["resident"] / answer["stated"],
                }
            )
    result.figures.setdefault("memory", []).extend(figures)


def _rates(field: _Field, case: Case, asks: dict[str, tuple[str, str, dict[str, Any]]], rounds: int, calls: int) -> dict[str, list[float]]:
    """M rows/s per round of everything asked for; what cannot run is left out and noted."""
    clock = "cpu" if case.threads == 1 else "wall"
    rates: dict[str, list[float]] = {}

    def ask(contenders: dict[str, Contender], chosen: list[str]) -> None:
        for key in chosen:
            contender, what, arguments = asks[key]
            if contender in contenders:
                seconds = float(np.median(contenders[contender].ask(what, calls=calls, **arguments)[clock]))
                rates.setdefault(key, []).append(case.batch / M / seconds)

    names = dict.fromkeys(name for name, _, _ in asks.values())
    groups = [set(names)] if case.rows * case.dim * 4 < LARGE_BYTES else [{name} for name in names]
    for group in groups:
        contenders = field.opened(case, group)
        for _ in range(rounds):
            ask(contenders, [key for key, (name, _, _) in asks.items() if name in group])
    return rates


def _same_work(contenders: dict[str, Contender], optimizer: str) -> None:
    """One update each leaves equal rows, or ``AssertionError``.

    torch's SparseAdam counts steps for all rows together, so only its first step is ours."""
    values = {}
    for name, contender in contenders.items():
        contender.ask("update", calls=0, **({} if name == "own" else {"order": "given"}))
        values[name] = contender.ask("values", count=16)["values"]
    for name, other in values.items():
        if "own" in values and not (name == "torch" and optimizer == "rowwise_adagrad"):
            present = np.any(values["own"], axis=1)  # A few ids in a thousand are lost before a table is full.
            assert present.sum() >= 0.8 * len(present)
            np.testing.assert_allclose(np.array(other)[present], np.array(values["own"])[present], rtol=2e-3, atol=2e-4, err_msg=name)


class _Field:
    """The contenders, started once and given new tables for every case. A context manager that ends them."""

    def __init__(self, result: Result, folder: Path) -> None:
        self.result = result
        self.folder = folder
        self._stack = ExitStack()
        self._running: dict[str, Contender] = {}

    def __enter__(self) -> _Field:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.__exit__(kind, error, trace)

    def opened(self, case: Case, names: set[str]) -> dict[str, Contender]:
        """Those of ``names`` that can run, with filled tables and one update done; the others hold no memory meanwhile."""
        rng = np.random.default_rng(1)
        batches = self.folder / "batches.npy"
        np.save(batches, np.stack([distinct(rng, case.rows, case.batch, case.alpha) for _ in range(BATCHES)]))
        common = {"rows": case.rows, "dim": case.dim, "optimizer": case.optimizer, "threads": case.threads, "batches": str(batches)}
        for name in set(self._running) - names:
            self._running[name].ask("close")
        contenders = {}
        for name in ("own", "torch", "fbgemm"):
            if name in names and (contender := self._started(name)):
                contender.ask("open", **common, **({} if name == "own" else {"kind": name}))
                contenders[name] = contender
        if "own" in names:
            contenders["own"].ask("open_limit")
        _same_work(contenders, case.optimizer)
        return contenders

    def _started(self, name: str) -> Contender | None:
        if name in self._running or name in self.result.missing:
            return self._running.get(name)
        python = peers_python()
        if name == "fbgemm" and python is None:
            self.result.missing[name] = "not installed; `make bench-peers` installs it"
            return None
        module = "benchmarks.own_rows" if name == "own" else "benchmarks.peer_rows"
        contender = Contender.start(name, module, python=python if name == "fbgemm" else None, threads=2)
        self._stack.enter_context(contender)
        try:
            contender.ask("close")
        except ContenderError as error:
            self.result.missing[name] = str(error)
            return None
        self._running[name] = contender
        return contender
