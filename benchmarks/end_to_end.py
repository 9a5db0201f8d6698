"""Training a DLRM of 13 dense features and 26 slots, batch 4096: with the trainer's own processes, and with what others offer.

All contenders are started first and then take turns, slice by slice. The dense network, its optimizer, the records and their order are
the same for all, and the page shows everybody's loss: mode hybrid is some steps behind early in training, mode sync equals FBGEMM.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import Contender, ContenderError, peers_python
from benchmarks.own_trainer import Measurement, OwnTrainer
from benchmarks.results import Result, Row, Spread
from benchmarks.streams import NUM_SLOTS, settings, write_data

DIM = 16
PEERS = {
    "bags": "26 nn.EmbeddingBag + torch sparse Adagrad",
    "joined": "one joined nn.EmbeddingBag + torch sparse Adagrad",
    "fbgemm": "FBGEMM TBE, fused row-wise Adagrad",
    "torchrec": "TorchRec DistributedModelParallel, fused row-wise Adagrad",
}
SAMPLES = "samples/s"


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    name: str
    rows: int
    flat_rows: tuple[int, ...]
    records: int
    batch: int
    rounds: int
    warm: int
    steps: int
    small: bool = False


SIZES = {
    "quick": Size("quick", 26_000, (2_600, 26_000), 4_096, 128, 1, 6, 4, small=True),
    "default": Size("default", 10**7, (10**6, 10**7), 4096 * 100, 4096, 3, 6, 10),
    "full": Size("full", 10**7, (10**6, 10**7, 10**8), 4096 * 200, 4096, 7, 6, 20),
}

PARTS_IN_ORDER = ("peers", "delay", "wire", "flatness")
Asked = dict[str, list[dict[str, Any]]]


def measure(size: Size, part: str) -> Result:
    """One of ``PARTS_IN_ORDER``."""
    result = Result(part, size=size.name)
    with tempfile.TemporaryDirectory() as folder:
        PARTS[part](result, size, Path(folder))
    return result


def _data(folder: Path, size: Size, rows: int, alpha: float) -> Path:
    """Records of a stream; made once."""
    made = folder / f"{rows}-{alpha}"
    if not made.exists():
        write_data(made, records=size.records, ids_per_slot=rows // NUM_SLOTS, alpha=alpha)
    return made


def _settings(size: Size, rows: int, **training: Any) -> dict[str, Any]:
    training = {"batch_size": size.batch, "roles": {"parameter_server": 1}, **training}
    return settings(rows=max(64, rows), small=size.small, **training)


def _take_turns(contenders: Mapping[str, Contender | OwnTrainer], size: Size) -> Asked:
    """The answers of every contender, round by round; the first round gets everybody going and is not counted."""
    answers: Asked = {name: [] for name in contenders}
    for number in range(size.rounds + 1):
        for name, contender in contenders.items():
            answer = contender.ask("train", warm=size.warm, steps=size.steps)
            if number:
                answers[name].append(answer)
    return answers


def _speeds(answers: Asked, name: str) -> list[float]:
    return [answer["samples_per_second"] for answer in answers[name]]


def _against_peers(result: Result, size: Size, folder: Path) -> None:
    rows, data = size.rows // NUM_SLOTS * NUM_SLOTS, _data(folder, size, size.rows, 1.05)
    cores = os.cpu_count() or 1
    with ExitStack() as stack:
        contenders: dict[str, Contender | OwnTrainer] = {}
        for name, threads in (("own", {}), ("own all", {"dense_threads": cores}))[: 1 if size.small else 2]:
            run = _settings(size, rows, **threads)
            contenders[name] = stack.enter_context(OwnTrainer(name, run, data, Measurement(prefill=rows)))
        first = contenders["own"].ask("train", warm=1, steps=1)
        kinds = {"ceiling": ("dense", cores), "ceiling own": ("dense", first["threads"]), **{name: (name, cores) for name in PEERS}}
        kinds = {name: kind for name, kind in kinds.items() if not size.small or name in ("ceiling", "joined", "fbgemm")}
        for name, (kind, threads) in kinds.items():
            if contender := _peer(result, stack, kind, threads, _settings(size, rows), rows, data):
                contenders[name] = contender
        answers = _take_turns(contenders, size)
    what = f"DLRM, 26 x {size.rows // NUM_SLOTS:,} rows of dim {DIM}, batch {size.batch}, Zipf 1.05"
    all_cores = f"{what}, dense network on {cores} threads"

    def add(what: str, ours: str, against: str, theirs: str, goal: float | None = None) -> None:
        if ours in answers and theirs in answers:
            row = Row.rates("end to end", what, against, SAMPLES, (_speeds(answers, ours), _speeds(answers, theirs)), goal=goal)
            result.rows.append(row)

    owns = [name for name in ("own", "own all") if name in answers]
    best = max(owns, key=lambda name: float(np.median(_speeds(answers, name))))
    default = f"{what}, trainer as configured by default ({first['threads']} dense threads)"
    texts = {"own": default, "own all": f"{what}, trainer with dense_threads {cores}"}
    add(texts["own"], "own", f"ceiling: dense network alone on {cores} threads", "ceiling", 0.95 if best == "own" else None)
    add(texts["own all"], "own all", f"ceiling: dense network alone on {cores} threads", "ceiling", 0.95 if best == "own all" else None)
    add(texts["own"], "own", f"dense network alone on {first['threads']} threads", "ceiling own")
    for name, text in PEERS.items():
        add(texts[best], best, text, name, 1.0)
        add(f"{text} ({cores} threads)", name, "ceiling of the same run", "ceiling") if name in answers else None
    result.figures["losses"] = {name: given[-1]["log_loss"] for name, given in answers.items() if name not in ("ceiling", "ceiling own")}
    result.figures["cpu_ms_per_step"] = {
        name: {role: 1e3 * float(np.median([a["cpu"][role] for a in answers[name]])) for role in answers[name][0]["cpu"]} for name in owns
    }
    result.figures["dense_threads"] = {"own": first["threads"], "own all": cores}
    result.figures["what"] = all_cores


def _peer(result: Result, stack: ExitStack, kind: str, threads: int, run: dict[str, Any], rows: int, data: Path) -> Contender | None:
    foreign = kind in ("fbgemm", "torchrec")
    if foreign and peers_python() is None:
        result.missing[PEERS[kind]] = "not installed; `make bench-peers` installs it"
        return None
    contender = stack.enter_context(
        Contender.start(kind, "benchmarks.peer_trainer", python=peers_python() if foreign else None, threads=threads)
    )
    try:
        contender.ask("open", kind=kind, settings=run, rows=rows, threads=threads, data=str(data))
    except ContenderError as error:
        result.missing[PEERS.get(kind, kind)] = str(error)
        return None
    return contender


def _delayed(result: Result, size: Size, folder: Path) -> None:
    """A server 20 ms away, and a wait of 5 ms in place of the dense network."""
    data = _data(folder, size, size.rows, 1.05)
    measurement = Measurement(prefill=size.rows // NUM_SLOTS * NUM_SLOTS, delay_seconds=0.020, dense_seconds=0.005)
    modes = {
        "sync": {"mode": "sync"},
        "hybrid": {"mode": "hybrid", "max_staleness": 16},
        "async": {"mode": "async", "max_staleness": 32},
    }
    with ExitStack() as stack:
        trainers: dict[str, Contender | OwnTrainer] = {}
        for name, training in modes.items():
            run = _settings(size, size.rows, **training)
            trainers[name] = stack.enter_context(OwnTrainer(name, run, data, measurement))
        # The pipeline of a mode with many permits must fill before anything is timed.
        answers = _take_turns(trainers, Size(**{**size.__dict__, "warm": 36 if size.rounds > 1 else 6, "steps": 4 * size.steps}))
    what = f"hybrid (bound 16), 20 ms of server delay, 5 ms wait as dense step, batch {size.batch}"
    hybrid = _speeds(answers, "hybrid")
    result.rows.append(Row.rates("delay", what, "own mode sync", SAMPLES, (hybrid, _speeds(answers, "sync")), goal=5.0))
    result.rows.append(Row.rates("delay", what, "own mode async (bound 32)", SAMPLES, (hybrid, _speeds(answers, "async")), goal=0.95))
    waits = [size.batch / 0.005] * len(hybrid)
    result.rows.append(Row.rates("delay", what, "the 5 ms wait alone", SAMPLES, (hybrid, waits)))
    result.figures["delay_staleness"] = {name: max(a["staleness"] for a in given) for name, given in answers.items()}
    result.figures["delay_cpu_ms_per_step"] = {
        name: {role: 1e3 * float(np.median([a["cpu"][role] for a in given])) for role in given[0]["cpu"]} for name, given in answers.items()
    }


def _wire(result: Result, size: Size, folder: Path) -> None:
    """Bytes between embedding workers and servers, and what half precision does to quality: mode sync, so that nothing else differs."""
    rows, data = size.rows // NUM_SLOTS * NUM_SLOTS, _data(folder, size, size.rows, 1.05)
    small = Size(**{**size.__dict__, "small": True})
    with ExitStack() as stack:
        trainers: dict[str, Contender | OwnTrainer] = {}
        for dtype in ("float16", "float32"):
            run = _settings(small, rows, mode="sync", wire_dtype=dtype)
            trainers[dtype] = stack.enter_context(OwnTrainer(dtype, run, data, Measurement(prefill=rows)))
        answers = _take_turns(trainers, size)
    samples = (size.warm + size.steps) * size.batch
    half, full = ([a["wire_bytes_so_far"] for a in answers[dtype]] for dtype in ("float16", "float32"))
    # Of consecutive slices, or, if there is only one, of everything so far.
    ours, deduped = ([(b - a) / samples for a, b in itertools.pairwise(counts)] or [counts[0] / (2 * samples)] for counts in (half, full))
    plain = [2.0 * NUM_SLOTS * (8 + 4 * DIM)] * len(ours)
    what = "bytes per sample between workers and servers, both ways, look-up and update"
    result.rows.append(Row.rates("wire", what, "float32 and no dedup (computed)", "bytes", (ours, plain), goal=0.3, at_most=True))
    result.rows.append(Row.rates("wire", what, "float32 with dedup (measured)", "bytes", (ours, deduped)))
    vectors = 2.0 * NUM_SLOTS * DIM
    both = ([a + 2 * vectors for a in ours], [a + 4 * vectors for a in plain])
    result.rows.append(
        Row.rates("wire", "the same and the pooled vectors between workers and ranks", "float32 and no dedup", "bytes", both)
    )
    result.figures["wire_auc"] = {dtype: Spread.of([a["auc"] for a in given]).__dict__ for dtype, given in answers.items()}
    result.figures["wire_auc_difference"] = answers["float16"][-1]["auc"] - answers["float32"][-1]["auc"]


def _flat(result: Result, size: Size, folder: Path) -> None:
    """Does training slow down as tables grow? Uniform ids: every step touches other rows."""
    for wait, text in ((0.0, "DLRM"), (0.005, "5 ms wait as dense step")):
        with ExitStack() as stack:
            trainers: dict[str, Contender | OwnTrainer] = {}
            for rows in size.flat_rows:
                data = _data(folder, size, rows, 0.0)
                rows = rows // NUM_SLOTS * NUM_SLOTS
                measured = Measurement(prefill=rows, dense_seconds=wait)
                trainers[str(rows)] = stack.enter_context(OwnTrainer(f"{rows} rows", _settings(size, rows), data, measured))
            turns = size if not wait else Size(**{**size.__dict__, "steps": 4 * size.steps})
            answers = _take_turns(trainers, turns)
        base = next(iter(answers))
        for name in list(answers)[1:]:
            row = Row.rates(
                "flatness",
                f"{text}, {int(name):,} rows, uniform ids, batch {size.batch}",
                f"the same with {int(base):,} rows",
                SAMPLES,
                (_speeds(answers, name), _speeds(answers, base)),
                goal=0.95,
            )
            result.rows.append(row)


PARTS: dict[str, Callable[[Result, Size, Path], None]] = dict(zip(PARTS_IN_ORDER, (_against_peers, _delayed, _wire, _flat), strict=True))
