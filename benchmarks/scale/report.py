"""Writes docs/scale.md and its plots from constants.json, calibrated.json and build/scale. The words stand here, the figures there."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.results import ROOT
from benchmarks.scale.measure import CONSTANTS
from benchmarks.scale.published import CALIBRATED, MODES
from benchmarks.scale.scenario import PUBLISHED_MODES, PUBLISHED_SIZES, Assumptions
from benchmarks.scale.study import KEPT, PARTS, RANKS, SWEEPS
from benchmarks.scale.words import ASSUMED_TEXT, END, FIT, HEAD, HELD_OUT, KWAI, OURS, REAL, SENSITIVITY, SWEPT

Found = dict[str, Any]
DOCS = ROOT / "docs"
FIT_FOR = {
    "rank_record_seconds": ("µs per record of a rank's main thread", 1e6, "async"),
    "worker_id_seconds": ("µs per id of a worker's thread, each way", 1e6, "sync to hybrid"),
    "jitter": ("deviation of compute over its mean", 1.0, "hybrid to async"),
}


def write(kept: Path = KEPT, docs: Path = DOCS) -> Path:
    """The page and its plots. Raises ``FileNotFoundError`` that says which part to run."""
    found = {part: _kept(kept, part) for part in (*PARTS, "id-space")}
    _plots(found, docs)
    constants = json.loads(CONSTANTS.read_text(encoding="utf-8"))
    calibrated = json.loads(CALIBRATED.read_text(encoding="utf-8"))
    parts = [
        HEAD.format(**_summary(found)),
        FIT.format(table=_fit(calibrated), modes=_modes_table(found["modes"])),
        HELD_OUT.format(sizes=_sizes_table(found["sizes"]), gpus=_gpus_table(found["modes"]), **_summary(found)),
        OURS.format(sizes=_bottlenecks(found["sizes"]), widths=_widths(found["widths"]), **_summary(found)),
        SWEPT.format(table=_sweeps(found["sweeps"]), bursts=_bursts(found["bursts"])),
        SENSITIVITY.format(
            published=_sensitivity(found["sensitivity-published"]), ours=_sensitivity(found["sensitivity-ours"]), assumed=_assumed()
        ),
        REAL.format(table=_real(found["id-space"]), long=_long(found["id-space"]["long"]), command=found["id-space"]["command"]),
        END.format(costs=_costs(constants), command=constants["command"], date=constants["date"], **constants["machine"]),
    ]
    path = docs / "scale.md"
    path.write_text("\n".join(parts), encoding="utf-8")
    return path


def _kept(folder: Path, part: str) -> Found:
    path = folder / f"{part}.json"
    if not path.is_file():
        how = "id-space" if part == "id-space" else f"simulate --only {part}"
        raise FileNotFoundError(f"{path}: not there yet; run python -m benchmarks.scale {how}")
    kept: Found = json.loads(path.read_text(encoding="utf-8"))
    return kept


def _spread(entry: Found) -> str:
    return f"{entry['median']:.2f} ({entry['low']:.2f} to {entry['high']:.2f})"


def _flatness(sizes: Found, system: str) -> float:
    """Largest distance of a size's median from the middle of all, as a share."""
    medians = [sizes[f"{system}/{size:g}"]["median"] for size in PUBLISHED_SIZES]
    return (max(medians) - min(medians)) / (max(medians) + min(medians))


def _ratio(modes: Found, system: str, ranks: int, other: str) -> float:
    return float(modes[f"{system}/{ranks}/hybrid"]["median"] / modes[f"{system}/{ranks}/{other}"]["median"])


def _summary(found: Found) -> Found:
    """What sentences quote."""
    sizes, modes = found["sizes"], found["modes"]
    left = found["handicap"]
    told: Found = {f"handicap_{mode}": f"{left[mode]['median']:.2f}" for mode in MODES}
    told["gain"] = f"{modes['ours 8/64/hybrid']['median'] / modes['published/64/hybrid']['median']:.1f}"
    tables = [entry["use"]["server table"] for name, entry in sizes.items() if name.startswith("published")]
    told["table_use"] = f"{max(tables):.0%}"
    real = {run["capacity"]: run["look_up"]["last"]["median"] for run in found["id-space"]["runs"]}
    told["least_rate"], told["most_rate"] = f"{real[max(real)]:.0f}", f"{real[min(real)]:.0f}"
    told["least_rows"], told["most_rows"] = (f"{rows:.0e}".replace("e+0", "e") for rows in (min(real), max(real)))
    told |= {"measured_flat": f"{(max(PUBLISHED_SIZES.values()) - min(PUBLISHED_SIZES.values())) / 2 / 1.85:.1%}"}
    one = found["sweeps"]["server_threads/1"]
    told["one_thread"] = f"{one['median']:.2f}"
    told["one_thread_table"] = f"{one['use']['server table']:.0%}"
    for system, key in (("published", "published"), ("ours 8", "ours_8"), ("ours 128", "ours_128")):
        told[f"{key}_flat"] = f"{_flatness(sizes, system):.1%}"
        told[f"{key}_rate"] = f"{modes[f'{system}/64/hybrid']['median']:.2f}"
        for other in ("sync", "async"):
            told[f"{key}_{other}"] = f"{_ratio(modes, system, 64, other):.2f}"
    return told


def _fit(calibrated: Found) -> str:
    fits = sorted([calibrated, *calibrated["others"]], key=lambda fit: fit["batch"])
    lines = [f"| quantity | governs | {' | '.join(str(fit['batch']) for fit in fits)} |", f"|---|---|{'---:|' * len(fits)}"]
    for name, (unit, factor, governs) in FIT_FOR.items():
        cells = [f"{factor * fit['values'][name]:.3g}" for fit in fits]
        lines.append(f"| `{name}`: {unit} | {governs} | {' | '.join(cells)} |")
    misses = [max(abs(fit["rates"][mode] / PUBLISHED_MODES[mode] - 1.0) for mode in MODES) for fit in fits]
    lines.append(f"| largest miss of the three published rates | | {' | '.join(f'{miss:.1%}' for miss in misses)} |")
    return "\n".join(lines)


def _modes_table(modes: Found) -> str:
    lines = ["| mode | published | published system, fitted | ours, width 8 | ours, width 128 |", "|---|---:|---:|---:|---:|"]
    for mode in MODES:
        cells = [_spread(modes[f"{system}/64/{mode}"]) for system in ("published", "ours 8", "ours 128")]
        lines.append(f"| {mode} | {PUBLISHED_MODES[mode]:.2f} | {' | '.join(cells)} |")
    for other in ("sync", "async"):
        given = PUBLISHED_MODES["hybrid"] / PUBLISHED_MODES[other]
        cells = [f"{_ratio(modes, system, 64, other):.2f}" for system in ("published", "ours 8", "ours 128")]
        lines.append(f"| hybrid / {other} | {given:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sizes_table(sizes: Found) -> str:
    lines = ["| parameters | published | published system, fitted at 1e14 |", "|---:|---:|---:|"]
    for size, rate in PUBLISHED_SIZES.items():
        lines.append(f"| {size / 1e12:g}e12 | {rate:.2f} | {_spread(sizes[f'published/{size:g}'])} |")
    return "\n".join(lines)


def _gpus_table(modes: Found) -> str:
    lines = ["| GPUs | hybrid / sync: Kwai-Video | fitted | ours, width 128 | hybrid / async: Kwai-Video | fitted | ours, width 128 |"]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in RANKS:
        cells = []
        for k, other in enumerate(("sync", "async")):
            cells += [f"{KWAI[ranks][k]:.2f}", *(f"{_ratio(modes, system, ranks, other):.2f}" for system in ("published", "ours 128"))]
        lines.append(f"| {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _bottlenecks(sizes: Found) -> str:
    lines = ["| parameters | width | million samples/s | worked most | then | a server's table |", "|---:|---:|---:|---|---|---:|"]
    for dim in (8, 128):
        for size in PUBLISHED_SIZES:
            entry = sizes[f"ours {dim}/{size:g}"]
            first, second = sorted(entry["use"].items(), key=lambda item: -item[1])[:2]
            busy = f"{first[0]} {first[1]:.0%} | {second[0]} {second[1]:.0%} | {entry['use']['server table']:.0%}"
            lines.append(f"| {size / 1e12:g}e12 | {dim} | {_spread(entry)} | {busy} |")
    return "\n".join(lines)


def _widths(widths: Found) -> str:
    lines = ["| width | million samples/s | worked most |", "|---:|---:|---|"]
    for dim, entry in widths.items():
        lines.append(f"| {dim} | {_spread(entry)} | {entry['bottleneck']} {entry['use'][entry['bottleneck']]:.0%} |")
    return "\n".join(lines)


def _sweeps(sweeps: Found) -> str:
    lines = ["| quantity | value | million samples/s | worked most | largest staleness |", "|---|---:|---:|---|---:|"]
    for name, (text, values) in SWEEPS.items():
        for value in values:
            entry = sweeps[f"{name}/{value}"]
            busy = f"{entry['bottleneck']} {entry['use'][entry['bottleneck']]:.0%}"
            lines.append(f"| {text} | {value} | {_spread(entry)} | {busy} | {entry['staleness']} |")
    return "\n".join(lines)


def _bursts(bursts: Found) -> str:
    lines = ["| a worker's cost per byte | one network for both | a network each |", "|---|---:|---:|"]
    for factor in ("0.5", "1", "2"):
        lines.append(f"| x {factor} | {_spread(bursts[f'shared/{factor}'])} | {_spread(bursts[f'apart/{factor}'])} |")
    return "\n".join(lines)


def _responses(found: Found) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Quantity -> factor -> (throughput of hybrid, hybrid / sync, hybrid / async), each over that as it is."""

    def figures(name: str, factor: str) -> tuple[float, float, float]:
        sync, hybrid, free = (found[f"{name}/{factor}/{mode}"]["median"] for mode in MODES)
        return hybrid, hybrid / sync, hybrid / free

    base = figures("as is", "1")
    pairs = dict.fromkeys(tuple(key.split("/")[:2]) for key in found)
    answers: dict[str, dict[str, tuple[float, float, float]]] = {}
    for name, factor in pairs:
        if name != "as is":
            changed = figures(name, factor)
            answers.setdefault(name, {})[factor] = tuple(a / b - 1.0 for a, b in zip(changed, base, strict=True))  # type: ignore[assignment]
    order = sorted(answers, key=lambda name: -max(abs(value) for change in answers[name].values() for value in change))
    return {name: answers[name] for name in order}


def _sensitivity(found: Found) -> str:
    lines = ["| quantity | changed to | hybrid | hybrid / sync | hybrid / async |", "|---|---|---:|---:|---:|"]
    quiet = []
    for name, changes in _responses(found).items():
        if max(abs(value) for change in changes.values() for value in change) < 0.02:
            quiet.append(f"`{name}`")
            continue
        for factor, change in changes.items():
            to = "uniform ids" if name == "ids_alpha" else f"x {factor}"
            lines.append(f"| `{name}` | {to} | {' | '.join(f'{value:+.0%}' for value in change)} |")
    return "\n".join(lines) + (f"\n\nLess than 2 % on any of them: {', '.join(quiet)}." if quiet else "")


def _assumed() -> str:
    default = Assumptions()
    lines = ["| assumption | value | what it is |", "|---|---:|---|"]
    for field in fields(Assumptions):
        lines.append(f"| `{field.name}` | {getattr(default, field.name):.3g} | {ASSUMED_TEXT[field.name]} |")
    return "\n".join(lines)


def _costs(constants: Found) -> str:
    lines = ["| measured | median (low to high) |", "|---|---:|"]
    told = {"look_up_ns_per_row": "look-up of training", "update_ns_per_row": "update", "insert_ns_per_row": "insertion at capacity"}
    for point in (*constants["table_by_dim"], *constants["table_by_rows"][1:]):
        for name, text in told.items():
            lines.append(
                f"| {text}, width {point['dim']}, {point['rows']:.0e} rows, ns per row | {_range(point[name])} |".replace("e+0", "e")
            )
    for group in ("worker", "loader"):
        lines += [f"| {name.replace('_', ' ')} | {_range(spread)} |" for name, spread in constants[group].items()]
    rpc = constants["rpc"]
    lines.append(f"| round trip of a small message over loopback, µs | {_range(rpc['round_trip_seconds'], 1e6)} |")
    lines.append(f"| CPU of one message at one end, µs | {_range(rpc['cpu_seconds_per_message_end'], 1e6)} |")
    lines.append(f"| CPU of a byte at both ends together, ns | {_range(rpc['cpu_ns_per_byte_both_ends'])} |")
    return "\n".join(lines)


def _range(spread: Found, factor: float = 1.0) -> str:
    median, low, high = (factor * spread[key] for key in ("median", "low", "high"))
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def _real(found: Found) -> str:
    heads = ("capacity", "signs seen", "rows evicted, times all places", "look-up, first tenth", "last tenth", "update, last tenth")
    lines = [f"| {' | '.join((*heads, 'regulars there', 'never lost'))} |"]
    lines.append("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for run in found["runs"]:
        rates = (run["look_up"]["first"], run["look_up"]["last"], run["update"]["last"])
        cells = [f"{rate['median']:.1f} M rows/s" for rate in rates]
        lines.append(
            f"| {run['capacity']:.0e} | {run['signs']:,} | {run['evicted']:,}, {run['evicted'] / run['places']:.2g} | "
            f"{' | '.join(cells)} | "
            f"{run['present']:.2%} | {run['intact']:.2%} |".replace("e+0", "e")
        )
    return "\n".join(lines)


def _long(run: Found) -> str:
    first, last = run["look_up"]["first"]["median"], run["look_up"]["last"]["median"]
    return (
        f"Long: {run['evicted']:,} evictions from a table of {run['places']:,} places "
        f"({run['evicted'] / run['places']:.0f} times all of it): "
        f"look-up {first:.1f} M rows/s in the first tenth, {last:.1f} in the last; memory of the process grew by "
        f"{run['resident_growth_bytes'] / 2**20:.1f} MiB; rows {run['rows']:,}; {run['intact']:.1%} of the regulars were never lost, "
        f"{run['absent_updates'] / run['signs']:.1e} of the updates found no row."
    )


def _plots(found: Found, docs: Path) -> None:
    mpl.use("agg")
    mpl.rcParams.update({"svg.hashsalt": "satrap", "svg.fonttype": "none", "font.size": 8})
    _plot_sizes(found["sizes"], docs / "scale-sizes.svg")
    _plot_modes(found["modes"], docs / "scale-modes.svg")
    _plot_sweeps(found["sweeps"], docs / "scale-sweeps.svg")
    _plot_sensitivity(found["sensitivity-published"], docs / "scale-sensitivity.svg")


def _errors(entries: list[Found]) -> list[list[float]]:
    return [[e["median"] - e["low"] for e in entries], [e["high"] - e["median"] for e in entries]]


def _plot_sizes(sizes: Found, path: Path) -> None:
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    given = list(PUBLISHED_SIZES)
    axes.plot(given, list(PUBLISHED_SIZES.values()), "k*", ms=8, label="published, measured by its authors")
    for system, text in (("published", "published system, fitted"), ("ours 8", "ours, width 8"), ("ours 128", "ours, width 128")):
        entries = [sizes[f"{system}/{size:g}"] for size in given]
        axes.errorbar(given, [e["median"] for e in entries], _errors(entries), fmt="o-", ms=3, capsize=2, label=f"simulated: {text}")
    axes.set_xscale("log")
    axes.set_xticks(given, [f"{size / 1e12:g}e12" for size in given])
    axes.minorticks_off()
    axes.set_ylim(0)
    axes.set(xlabel="parameters", ylabel="million samples/s, 64 GPUs, hybrid")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _save(figure, path)


def _plot_modes(modes: Found, path: Path) -> None:
    figure = Figure(figsize=(8, 2.8), layout="constrained")
    titles = {"published": "published system, fitted", "ours 8": "ours, width 8", "ours 128": "ours, width 128"}
    for axes, (system, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for mode, colour in zip(MODES, ("C3", "C0", "C2"), strict=True):
            entries = [modes[f"{system}/{ranks}/{mode}"] for ranks in RANKS]
            axes.errorbar(RANKS, [e["median"] for e in entries], _errors(entries), fmt="o-", ms=3, capsize=2, color=colour, label=mode)
            if system == "published":
                axes.plot([64], [PUBLISHED_MODES[mode]], "*", ms=9, color=colour, mec="black", mew=0.5)
        axes.set(title=title, xlabel="GPUs", xticks=RANKS)
        axes.set_ylim(0)
    figure.axes[0].set_ylabel("million samples/s")
    figure.axes[0].legend(frameon=False, title="stars: published")
    _save(figure, path)


def _plot_sweeps(sweeps: Found, path: Path) -> None:
    figure = Figure(figsize=(9, 2.6), layout="constrained")
    panels = figure.subplots(1, len(SWEEPS), sharey=True)
    for axes, (name, (text, values)) in zip(panels, SWEEPS.items(), strict=True):
        entries = [sweeps[f"{name}/{value}"] for value in values]
        axes.errorbar(range(len(values)), [e["median"] for e in entries], _errors(entries), fmt="o-", ms=3, capsize=2)
        axes.set_xticks(range(len(values)), [str(value) for value in values])
        axes.set_xlabel(text)
    panels[0].set_ylim(0, 1.08 * max(entry["high"] for entry in sweeps.values()))
    panels[0].set_ylabel("million samples/s")
    _save(figure, path)


def _plot_sensitivity(found: Found, path: Path) -> None:
    answers = {name: changes for name, changes in _responses(found).items() if name != "ids_alpha"}
    figure = Figure(figsize=(8, 0.9 + 0.24 * len(answers)), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for k, (axes, title) in enumerate(zip(panels, ("hybrid, samples/s", "hybrid / sync", "hybrid / async"), strict=True)):
        for factor, colour in (("0.5", "C0"), ("2", "C1")):
            places = [i for i, changes in enumerate(answers.values()) if factor in changes]
            values = [100 * changes[factor][k] for changes in answers.values() if factor in changes]
            axes.barh([p + (0.2 if factor == "2" else -0.2) for p in places], values, 0.4, color=colour, label=f"x {factor}")
        axes.axvline(0, color="black", lw=0.6)
        axes.set(title=title, xlabel="change in %")
    panels[0].set_yticks(range(len(answers)), list(answers))
    panels[0].invert_yaxis()
    panels[0].legend(frameon=False, loc="lower left")
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    path.write_text("\n".join(line.rstrip() for line in path.read_text(encoding="utf-8").splitlines()) + "\n", encoding="utf-8")
