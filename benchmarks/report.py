"""Writes docs/performance.md and its plots from benchmarks/results/*.json. The words stand here, the figures there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.results import RESULTS, ROOT, Result, Row, Spread, load

DOCS = ROOT / "docs"

HEAD = """# Performance

<!-- Written by benchmarks/report.py from what `make bench` measured; change the words there. -->

Every figure below is a comparison made in one run: the contenders are processes that take turns, round by round, on the same ids, and a
ratio is taken within a round. Shown are medians with the lowest and highest round in brackets. A row **falls short** where the median
misses its goal. Absolute rates of a virtual machine differ by a factor of two from hour to hour; ratios differ by a tenth or so.

Measured on {cpu} ({vector}), {cores} cores, {memory_gib} GiB, Python {python}; size `{size}`; load average at the end of the
parts up to {load} (this program alone makes 2 to 3: what is beyond that is others').{missing} To repeat:

```
make bench-peers  # once: FBGEMM and TorchRec in an environment of their own
make bench        # under ten minutes on two cores; python -m benchmarks --full adds 1e8 rows
```

## Goals
"""

SECTIONS: dict[str, tuple[str, str]] = {
    "look-up": (
        "Look-up by sign",
        """The growing table finds rows by 64-bit sign; everybody else is told where they lie. {batch} different ids a call, as a parameter
server sees them after dedup. Ours come in hash order, as its worker sends them; known rows come as the ids arrive and, separately,
sorted, which is the best that can be done for them. CPU time of one core, or wall time where two threads work.

**What limits it.** A look-up by sign reads one or two cache lines of index and then the row: at dim 16 that is two to three lines where
known rows need one, so half the rate of the bare gather is the ceiling, not its whole; from dim 64 on the row itself dominates and the
two meet. FBGEMM's forward pass was expected to be slow from measurements with repeated, unsorted ids in 26 small tables and on another
processor. On different ids from one table its loop is a plain gather, as good as torch's, and a table that must search first cannot be
twice as fast as a gather that need not.""",
    ),
    "update": (
        "Update by sign",
        """Backward pass and optimizer step alone, gradients of different ids given. torch has no row-wise Adagrad.

**What limits it.** As above: the update must find its row again (a row may have been evicted since its look-up), so it reads the index
once more; the arithmetic and the row's line are what the limit has, too.""",
    ),
    "occurrences": (
        "The whole way of a batch",
        """Ids with their repeats, {unique:.0%} of them different: ours pays for dedup and for the sum of gradients per sign here, and in
return sends and updates every row once. One thread.""",
    ),
    "evict": ("Insertion at capacity", "New signs into a table that has room, and into one that must evict a row for each."),
    "round trip": ("Server round trip", ""),
    "end to end": (
        "Training a DLRM",
        """13 dense features, 26 slots, bottom 512-256-16, dot interaction, top 512-256-1, Adam for the dense network, row-wise Adagrad for
rows where it exists. Ours runs its real processes: loader, embedding worker, parameter server and one rank. All use this machine's cores;
losses after as many steps: {losses}. So early in training, staleness keeps mode hybrid some steps behind (in one
separate check, mode sync ended at 0.5790, FBGEMM at 0.5792 and hybrid at 0.5888).

CPU milliseconds per step by role: {cpu}.

**What limits it.** On one machine the servers take their CPU from the dense network: with all cores in the dense network's hands the
ceiling leaves nothing for anybody, and whoever does embedding work, hidden or not, stays below it by that work's share of the CPU. What
the trainer hides is latency. Against the dense network on as many threads as the trainer gives it, the rest is what the ceiling means
when servers have machines of their own.""",
    ),
    "flatness": (
        "Training as the tables grow",
        """The same stream law over more rows, all of them in the table from the start; uniform ids, so that nearly every row of a batch is
cold. **What limits it.** Memory: a larger table has more pages than the processor's address cache, and uniform ids over fewer rows
repeat within a batch more often (5 % fewer rows per batch at 1e6).""",
    ),
    "delay": (
        "A distant server",
        """20 ms are added to every look-up and update inside the server, and the dense network is replaced by a 5 ms wait. Largest
staleness seen: {staleness}. CPU milliseconds per step: {delay_cpu}.

**What limits it.** Mode sync pays both delays every step. The others are limited
by CPU: loader, worker, server and rank share the cores, so a step takes their work and not 5 ms.""",
    ),
    "wire": (
        "Bytes on the wire",
        """Arrays of requests and replies, counted at the servers. Mode sync, so that only the wire differs: AUC of the last batches with
float16 minus that with float32: {auc:+.5f}. **What limits it.** Signs are 8 bytes each and travel twice per different id.""",
    ),
}

MEMORY = """## Memory per row

Tables with room for {capacity} rows, filled with 90 % and 100 % as many different signs. "Index" is what the index costs per row in the
table; "all" adds the places that are unused, which is what a smaller table would save and lose in return as evictions before it is full.
"Resident" is what the system counts for the process, by what the table says of itself.

| dim | optimizer | values + state | filled | index bytes per row | all bytes beside values + state | ids lost | resident / stated |
|---:|---|---:|---:|---:|---:|---:|---:|
"""
MEMORY_END = """
Goals: at most 16 bytes more than values and state at load 0.9 with less than 1 % of ids lost, resident within 5 % of stated. {verdict}
"""


def write(results: Path = RESULTS, docs: Path = DOCS) -> Path:
    """The page and its plots, from the results there are."""
    loaded = [load(path) for path in sorted(results.glob("*.json"))]
    found = {result.name: result for result, _ in loaded}
    rows = [row for result in found.values() for row in result.rows]
    described = loaded[0][1]
    missing = {name: why for result in found.values() for name, why in result.missing.items()}
    absent = "".join(f" {name} did not take part: {why}." for name, why in missing.items())
    sizes = "/".join(sorted({result.size for result in found.values()}))
    parts = [
        HEAD.format(**{**described, "load": max(machine["load"] for _, machine in loaded)}, size=sizes, missing=absent),
        _goals(rows, found),
    ]
    parts += [_section(name, [row for row in rows if row.section == name], found) for name in SECTIONS]
    memory = found["rows"].figures["memory"] if "rows" in found else []
    parts.append(_memory(memory) if memory else "")
    _plots(rows, docs)
    page = docs / "performance.md"
    page.write_text("\n".join(part for part in parts if part).rstrip() + "\n")
    return page


def _goals(rows: Sequence[Row], found: dict[str, Result]) -> str:
    """One line per goal: the range of its cases, and how many reach it."""
    lines = ["| what | against | goal | ratios, worst to best case | reached |", "|---|---|---:|---:|---|"]
    grouped: dict[tuple[str, str, float, bool], list[Row]] = {}
    for row in rows:
        if row.goal is not None:
            grouped.setdefault((_title(row.section), row.against, row.goal, row.at_most), []).append(row)
    for (title, against, goal, at_most), cases in grouped.items():
        ratios = sorted((row.ratio.median for row in cases), reverse=at_most)
        spread = f"{ratios[0]:.2f}" if len(ratios) == 1 else f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        reached = sum(bool(row.reached) for row in cases)
        verdict = "yes" if reached == len(cases) else "**falls short**" if not reached else f"**{reached} of {len(cases)} cases**"
        lines.append(f"| {title} | {against} | {_goal(goal, at_most=at_most)} | {spread} | {verdict} |")
    if "rows" in found and found["rows"].figures["memory"]:
        lines.append(
            f"| Memory per row | values + state | <= 16 bytes more at load 0.9 | {_memory_goal(found['rows'].figures['memory'])} |"
        )
    return "\n".join(lines) + "\n"


def _section(name: str, rows: Sequence[Row], found: dict[str, Result]) -> str:
    if not rows:
        return ""
    title, text = SECTIONS[name]
    lines = [f"## {title}", "", text.format(**_figures(found)), ""]
    plot = {"look-up": "rows", "end to end": "training"}.get(name)
    if plot:
        lines += [f"![{title}](performance-{plot}.svg)", ""]
    lines += ["| what | ours | against | theirs | ours / theirs | goal |", "|---|---:|---|---:|---:|---:|"]
    for row in rows:
        goal = "" if row.goal is None else _goal(row.goal, at_most=row.at_most) + ("" if row.reached else " **falls short**")
        cells = (row.what, _number(row.ours, row.unit), row.against, _number(row.theirs, row.unit), _ratio(row.ratio), goal)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _figures(found: dict[str, Result]) -> dict[str, Any]:
    """What the texts mention; a dash for what was not measured."""
    training = {name: figure for part in found.values() for name, figure in part.figures.items()}
    names = {"own": "trainer as configured by default", "own all": "trainer with all threads"}
    return {
        "batch": "100,000",
        "unique": training.get("unique_share", float("nan")),
        "losses": ", ".join(f"{names.get(name, name)} {loss:.4f}" for name, loss in training.get("losses", {}).items()) or "-",
        "cpu": "; ".join(f"{names[name]}: {_roles(roles)}" for name, roles in training.get("cpu_ms_per_step", {}).items()) or "-",
        "delay_cpu": "; ".join(f"{name}: {_roles(roles)}" for name, roles in training.get("delay_cpu_ms_per_step", {}).items()) or "-",
        "staleness": ", ".join(f"{name} {value}" for name, value in training.get("delay_staleness", {}).items()) or "-",
        "auc": training.get("wire_auc_difference", float("nan")),
    }


def _roles(roles: dict[str, float]) -> str:
    return ", ".join(f"{role} {milliseconds:.1f}" for role, milliseconds in roles.items())


def _memory(figures: list[dict[str, Any]]) -> str:
    capacities = sorted({figure["capacity"] for figure in figures})
    lines = [MEMORY.format(capacity=" or ".join(f"{capacity:,}" for capacity in capacities)).rstrip()]
    lines += [
        f"| {f['dim']} | {f['optimizer']} | {f['payload']} | {f['load']:.0%} | {f['index_bytes']:.1f} | {f['all_bytes']:.1f} "
        f"| {f['lost']:.3%} | {f['resident_ratio']:.3f} |"
        for f in figures
    ]
    verdict = "The index alone stays below the goal; with unused places the row falls short: their number is the price of losing few ids."
    if all(figure["all_bytes"] <= 16 for figure in figures if figure["load"] == 0.9):
        verdict = "All are reached."
    return "\n".join(lines) + MEMORY_END.format(verdict=verdict)


def _memory_goal(figures: list[dict[str, Any]]) -> str:
    at = [figure for figure in figures if figure["load"] == 0.9]
    index, everything, lost = ([figure[key] for figure in at] for key in ("index_bytes", "all_bytes", "lost"))
    verdict = (
        "yes" if max(everything) <= 16 and max(lost) < 0.01 else "index yes, **with unused places no**" if max(index) <= 16 else "**no**"
    )
    return f"index {max(index):.1f}, all {min(everything):.0f} to {max(everything):.0f}, lost {max(lost):.2%} | {verdict}"


def _title(section: str) -> str:
    return SECTIONS.get(section, (section, ""))[0]


def _goal(goal: float, *, at_most: bool) -> str:
    return f"{'<=' if at_most else '>='} {goal:g}"


def _number(spread: Spread, unit: str) -> str:
    digits = 0 if spread.median >= 1000 else 1
    return f"{spread.median:,.{digits}f} {unit}"


def _ratio(ratio: Spread) -> str:
    return f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _plots(rows: Sequence[Row], docs: Path) -> None:
    """Two plots, of those sections that were measured."""
    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "satrap", "svg.fonttype": "none", "font.size": 8})
    reads = [row for row in rows if row.section == "look-up" and row.what.startswith("look-up by sign, dim")]
    cases: dict[str, dict[str, Spread]] = {}
    for row in reads:
        entry = cases.setdefault(row.what.removeprefix("look-up by sign, "), {"by sign": row.ours})
        names = {"FBGEMM TBE, known rows, ids as they come": "FBGEMM", "torch.index_select, known rows, sorted for it": "torch"}
        names["limit: prefetching gather of known rows, sorted"] = "limit"
        if row.against in names:
            entry[names[row.against]] = row.theirs
    if cases:
        _bars(docs / "performance-rows.svg", cases, "M rows/s")
    runs: dict[str, dict[str, Spread]] = {}
    for row in rows:
        if row.section == "end to end":
            mine = row.what.startswith("DLRM")
            runs.setdefault(row.what.rpartition("Zipf 1.05, ")[2] if mine else row.what, {"": row.ours})
            if row.against.startswith(("ceiling: ", "dense network alone")):
                runs.setdefault(row.against, {"": row.theirs})
    if runs:
        _bars(docs / "performance-training.svg", runs, "samples/s")


def _bars(path: Path, groups: dict[str, dict[str, Spread]], unit: str) -> None:
    """Horizontal bars in groups, with the range of the rounds."""
    from matplotlib.figure import Figure

    series = list(dict.fromkeys(name for group in groups.values() for name in group))
    height = 0.8 / len(series)
    figure = Figure(figsize=(8, 0.6 + 0.16 * len(series) * len(groups) + 0.12 * len(groups)), layout="constrained")
    axes = figure.subplots()
    for k, name in enumerate(series):
        places = [g + (k - (len(series) - 1) / 2) * height for g, group in enumerate(groups.values()) if name in group]
        spreads = [group[name] for group in groups.values() if name in group]
        errors = [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]
        axes.barh(places, [s.median for s in spreads], height, xerr=errors, label=name, error_kw={"lw": 0.8})
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.spines[["top", "right"]].set_visible(False)
    if len(series) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
