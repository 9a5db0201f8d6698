"""What a benchmark leaves: rows of figures with their spread, one JSON file per benchmark, read by ``benchmarks.report``."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of the rounds of one run."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def ratio(cls, ours: Sequence[float], theirs: Sequence[float]) -> Spread:
        """Of ours / theirs, round by round: what disturbs the machine disturbs both."""
        return cls.of([a / b for a, b in zip(ours, theirs, strict=True)])


@dataclass(frozen=True)
class Row:
    """One comparison."""

    section: str
    what: str
    against: str
    unit: str
    ours: Spread
    theirs: Spread
    ratio: Spread
    goal: float | None = None
    """The ratio to reach; None where the row only informs."""
    at_most: bool = False
    """Whether the goal is a ceiling."""
    slack: float = 0.0
    """What the issue allows beyond the goal."""

    @classmethod
    def rates(cls, section: str, what: str, against: str, unit: str, rates: tuple[Sequence[float], Sequence[float]], **goal: Any) -> Row:
        """From our rates and theirs, one per round."""
        ours, theirs = rates
        return cls(section, what, against, unit, Spread.of(ours), Spread.of(theirs), Spread.ratio(ours, theirs), **goal)

    @property
    def reached(self) -> bool | None:
        if self.goal is None:
            return None
        return self.ratio.median <= self.goal if self.at_most else self.ratio.median >= self.goal


@dataclass
class Result:
    """Everything one benchmark measured."""

    name: str
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """What else the page needs, by name."""
    missing: dict[str, str] = field(default_factory=dict)
    """Contenders that could not run, and why."""
    size: str = "default"

    def save(self, folder: Path = RESULTS) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps({"machine": machine(), **asdict(self)}, indent=1) + "\n")
        return path


def load(path: Path) -> tuple[Result, dict[str, Any]]:
    """A saved result and the machine it was measured on."""
    content = json.loads(path.read_text())
    described = content.pop("machine")
    spreads = ("ours", "theirs", "ratio")
    rows = [Row(**{key: Spread(**value) if key in spreads else value for key, value in row.items()}) for row in content.pop("rows")]
    return Result(rows=rows, **content), described


def machine() -> dict[str, Any]:
    """The machine in general words."""
    model, memory = platform.processor() or platform.machine(), 0
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemTotal:"):
            memory = round(int(line.split()[1]) / 2**20)
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith("flags")), "")
    vector = next((name for name in ("avx512f", "avx2", "asimd") if f" {name}" in flags), "")
    return {
        "cpu": model,
        "vector": vector,
        "cores": os.cpu_count(),
        "memory_gib": memory,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0]),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
