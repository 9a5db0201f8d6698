"""Every simulation that the page shows, with several seeds where a rate is quoted; kept in build/scale, so that parts can be made anew.

The sensitivity of a figure to a quantity is its change when that quantity alone is halved and doubled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, Spread
from benchmarks.scale.published import MODES, published
from benchmarks.scale.scenario import PUBLISHED_SIZES, Scenario, ours
from benchmarks.scale.simulation import Outcome, simulate

KEPT = ROOT / "build" / "scale"
SEEDS = (0, 1, 2)
RANKS = (8, 16, 32, 64)
SWEEPS: dict[str, tuple[str, tuple[int, ...]]] = {
    "servers": ("parameter servers", (2, 4, 8, 15, 30, 60)),
    "workers": ("embedding workers", (8, 17, 35, 70)),
    "max_staleness": ("staleness bound", (0, 1, 2, 4, 8)),
    "batch": ("records per rank and step", (1024, 2048, 4096, 8192)),
    "server_threads": ("threads per server", (1, 4, 16)),
}
COSTS = ("look_up_seconds", "update_seconds", "dedup_seconds", "expand_seconds", "sum_seconds", "encode_seconds", "decode_seconds")
COSTS += ("message_seconds", "byte_seconds", "read_seconds")
CALIBRATED = ("rank_record_seconds", "worker_id_seconds")
ASSUMED = ("wire_seconds", "gpu_flops", "bus_bytes_per_second", "launch_seconds", "thread_efficiency", "jitter", "growth_beyond")
Run = Callable[..., Iterable[Outcome]]


def _runs(run: Run, scenarios: dict[str, Scenario], seeds: tuple[int, ...] = SEEDS) -> dict[str, dict[str, Any]]:
    """Per name: million samples/s over the seeds, and what the first seed's stations did."""
    flat = [(name, replace(scenario, seed=seed)) for name, scenario in scenarios.items() for seed in seeds]
    outcomes = list(run(simulate, [scenario for _, scenario in flat]))
    found: dict[str, dict[str, Any]] = {}
    for name in scenarios:
        mine = [outcome for (other, _), outcome in zip(flat, outcomes, strict=True) if other == name]
        rates = [outcome.samples_per_second / 1e6 for outcome in mine]
        found[name] = {"rates": rates, **asdict(Spread.of(rates)), "use": mine[0].use, "bottleneck": mine[0].bottleneck}
        found[name] |= {"staleness": max(outcome.staleness for outcome in mine), "step_seconds": mine[0].step_seconds}
    return found


def sizes(run: Run) -> dict[str, Any]:
    """Throughput by number of parameters, mode hybrid."""
    given = {f"published/{size:g}": published(parameters=size) for size in PUBLISHED_SIZES}
    given |= {f"ours 8/{size:g}": ours(size, dim=8) for size in PUBLISHED_SIZES}
    given |= {f"ours 128/{size:g}": ours(size) for size in PUBLISHED_SIZES}
    return _runs(run, given)


def modes(run: Run) -> dict[str, Any]:
    """Modes by number of GPUs."""
    given = {f"published/{ranks}/{mode}": published(ranks=ranks, mode=mode) for ranks in RANKS for mode in MODES}
    for dim in (8, 128):
        given |= {f"ours {dim}/{ranks}/{mode}": ours(dim=dim, ranks=ranks, mode=mode) for ranks in RANKS for mode in MODES}
    return _runs(run, given)


def sweeps(run: Run) -> dict[str, Any]:
    """One quantity at a time, ours at width 128, mode hybrid, 1e14 parameters."""
    return _runs(run, {f"{name}/{value}": ours(**{name: value}) for name, (_, values) in SWEEPS.items() for value in values})


def handicap(run: Run) -> dict[str, Any]:
    """Ours at width 8 with the fitted cost of the published system's ranks: what is left of the advantage if ours have it, too."""
    rank = published().costs.rank_record_seconds
    return _runs(run, {mode: ours(dim=8, mode=mode).cost(rank_record_seconds=rank) for mode in MODES})


def bursts(run: Run) -> dict[str, Any]:
    """Vectors and all-reduce share the GPU machines' network: with faster and slower workers, and with networks of their own."""
    base = ours()
    faster = {factor: base.cost(byte_seconds=factor * base.costs.byte_seconds) for factor in (0.5, 1.0, 2.0)}
    given = {f"shared/{factor:g}": scenario for factor, scenario in faster.items()}
    given |= {f"apart/{factor:g}": replace(scenario, reduce_apart=True) for factor, scenario in faster.items()}
    return _runs(run, given)


def widths(run: Run) -> dict[str, Any]:
    """Throughput by width of a row."""
    return _runs(run, {f"{dim}": ours(dim=dim) for dim in (8, 16, 32, 64, 128)})


def sensitivity(run: Run, system: str) -> dict[str, Any]:
    """All modes with one quantity halved or doubled; one seed, the same for all, so that chance hits all alike."""
    given: dict[str, Scenario] = {}
    for mode in MODES:
        scenario = replace(published() if system == "published" else ours(), mode=mode)
        given[f"as is/1/{mode}"] = scenario
        for factor in (0.5, 2.0):
            for name in ASSUMED:
                if (factor, name) != (2.0, "thread_efficiency"):  # It cannot be above 1.
                    given[f"{name}/{factor:g}/{mode}"] = scenario.assume(**{name: factor * getattr(scenario.assumptions, name)})
            for name in CALIBRATED if system == "published" else COSTS:
                given[f"{name}/{factor:g}/{mode}"] = scenario.cost(**{name: factor * getattr(scenario.costs, name)})
            for name in ("batch", "max_staleness"):
                given[f"{name}/{factor:g}/{mode}"] = replace(scenario, **{name: int(factor * getattr(scenario, name))})
        given[f"ids_alpha/0/{mode}"] = scenario.assume(ids_alpha=0.0)
    return _runs(run, given, seeds=(0,))


PARTS: dict[str, Callable[[Run], dict[str, Any]]] = {
    "sizes": sizes,
    "modes": modes,
    "sweeps": sweeps,
    "handicap": handicap,
    "bursts": bursts,
    "widths": widths,
    "sensitivity-published": partial(sensitivity, system="published"),
    "sensitivity-ours": partial(sensitivity, system="ours"),
}


def keep(part: str, found: dict[str, Any], folder: Path = KEPT) -> Path:
    """Write one part's figures."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path
