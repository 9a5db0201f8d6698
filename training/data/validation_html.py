"""``report.html`` of the validate stage."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from training import report as build
from training.config import SPLITS, Config, SplitName, Threshold
from training.data.manifest import DenseStatistics, Manifest, SlotStatistics
from training.data.validation_report import ValidationReport
from training.report import Html, Tone

_TONES: dict[str, Tone] = {"passed": "good", "warned": "warn", "failed": "bad", "warn": "warn", "fail": "bad"}
MAX_BARS = 40
MAX_HISTOGRAMS = 12
TOP_VALUES = 10


def render(report: ValidationReport, config: Config, manifest: Manifest, before: Manifest | None) -> str:
    """The page of a validation report."""
    same = before is not None and before.fingerprint == manifest.fingerprint
    other = None if same else before
    blocks = [_verdict(report), _tiles(report), *_findings(report), *_splits(report, manifest), *_missing(report, config)]
    blocks += _drift(report, config) if other is not None else []
    blocks += _distributions(report, manifest, other)
    blocks += [build.heading("All features"), _feature_table(report), *_method(before is not None)]
    subtitle = f"data {report.fingerprint[:12]}"
    if same:
        subtitle += " · the same data as in the previous run"
    elif before is not None:
        subtitle += f" · compared with the previous run's data {before.fingerprint[:12]}"
    return build.page(f"Data validation: {report.name}", blocks, subtitle=subtitle)


def _verdict(report: ValidationReport) -> Html:
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in ("fail", "warn")}
    words = {
        "passed": "All checks passed.",
        "warned": f"{counts['warn']} warnings, no failures.",
        "failed": f"{counts['fail']} failed, {counts['warn']} warnings.",
    }
    return build.paragraph(
        build.badge(report.status, _TONES[report.status]), "  " + words[report.status].replace("1 warnings", "1 warning")
    )


def _tiles(report: ValidationReport) -> Html:
    train = report.splits["train"]
    change = ""
    if train.previous_rows is not None:
        change = f"previous run: {train.previous_rows:,}"
    rate = "" if train.previous_positive_rate is None else f"previous run: {build.percent(train.previous_positive_rate, digits=2)}"
    dead = sum(report.dead.values())
    kinds = [feature.kind for feature in report.features]
    return build.tiles(
        [
            ("Train records", build.number(train.rows), change),
            ("Positive rate in train", build.percent(train.positive_rate, digits=2), rate),
            ("Test records", build.number(report.splits["test"].rows), f"valid: {report.splits['valid'].rows:,}"),
            ("Features", str(len(kinds)), f"{kinds.count('dense')} numeric, {kinds.count('categorical')} slots"),
            ("Malformed records", build.number(dead), ", ".join(f"{reason}: {count:,}" for reason, count in sorted(report.dead.items()))),
        ]
    )


def _findings(report: ValidationReport) -> list[Html]:
    if not report.findings:
        return []
    rows = [(build.badge(f.severity, _TONES[f.severity]), f.feature or "", f.message, f.remedy) for f in report.findings]
    return [build.heading("Findings"), build.table(["", "Feature", "What", "What to do"], rows)]


def _splits(report: ValidationReport, manifest: Manifest) -> list[Html]:
    compared = report.previous_fingerprint is not None
    timed = any(shard.first_time is not None for shard in manifest.shards)
    columns = ["Split", "Records", *(["Previous"] if compared else []), "Positive rate", *(["Previous"] if compared else [])]
    rows: list[list[build.Cell]] = []
    for split in SPLITS:
        entry = report.splits[split]
        row: list[build.Cell] = [split, entry.rows]
        row += [entry.previous_rows] if compared else []
        row += [entry.positive_rate]
        row += [entry.previous_positive_rate] if compared else []
        rows.append([*row, _time_range(manifest, split)] if timed else row)
    return [build.heading("Splits"), build.table([*columns, "Event time (UTC)"] if timed else columns, rows)]


def _time_range(manifest: Manifest, split: SplitName) -> str | None:
    shards = [shard for shard in manifest.shards if shard.split == split]
    first = [shard.first_time for shard in shards if shard.first_time is not None]
    last = [shard.last_time for shard in shards if shard.last_time is not None]
    if not first or not last:
        return None
    texts = [datetime.datetime.fromtimestamp(t, datetime.UTC).strftime("%Y-%m-%d %H:%M") for t in (min(first), max(last))]
    return f"{texts[0]} to {texts[1]}"


@dataclass(frozen=True)
class _Bars:
    """Horizontal bars per feature, largest first, with the limits as lines; at most ``MAX_BARS`` of them."""

    features: list[str]
    values: list[float | None]
    limits: Threshold
    label: str
    caption: str
    second: list[float | None] | None = None
    """A bar below each."""
    noise: list[float | None] | None = None
    """A mark on each."""
    names: tuple[str, str] = ("this run", "previous run")
    percent: bool = False

    def figure(self) -> Html:
        scale = 100.0 if self.percent else 1.0
        first, second, noise = (
            np.array([scale * (value or 0.0) for value in series or [None] * len(self.features)])
            for series in (self.values, self.second, self.noise)
        )
        order = np.argsort(-np.maximum(first, second), kind="stable")[:MAX_BARS]
        first, second, noise = first[order], second[order], noise[order]
        rows = np.arange(len(order))[::-1]

        def plot(axes: Any) -> None:
            paired = self.second is not None
            axes.barh(rows + 0.18 * paired, first, 0.36 if paired else 0.62, color=build.PALETTE[0], label=self.names[0])
            if paired:
                axes.barh(rows - 0.18, second, 0.36, color=build.PALETTE[1], label=self.names[1])
            if self.noise is not None:
                axes.plot(noise, rows, "|", color="#1c2430", markersize=10, label="sampling noise alone")
            top = self._limits(axes, max(*first, *second, *noise, 1.0 if self.percent else 0.01), scale)
            axes.set_xlim(0, top * 1.06)
            axes.set_yticks(rows, [build.figure_text(self.features[i]) for i in order])
            axes.set_ylim(-0.7, len(order) - 0.3)
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(self.label)
            axes.figure.legend(loc="outside upper left", ncols=2, fontsize=9)

        hidden = len(self.features) - len(order)
        caption = self.caption + (f" The {MAX_BARS} largest of {len(self.features)} features." if hidden else "")
        return build.figure(build.draw(plot, width=6.2, height=1.7 + 0.27 * len(order)), caption)

    def _limits(self, axes: Any, top: float, scale: float) -> float:
        """Draw the limits that are not far off; returns the end of the axis."""
        unit = " %" if self.percent else ""
        for limit, colour, name in ((self.limits.warn, "#c78a00", "warn above"), (self.limits.fail, "#b42318", "fail above")):
            if limit is not None and scale * limit <= 3 * top:
                axes.axvline(scale * limit, color=colour, linestyle="--", linewidth=1.2, label=f"{name} {scale * limit:g}{unit}")
                top = max(top, scale * limit)
        return top


def _missing(report: ValidationReport, config: Config) -> list[Html]:
    limits, compared = config.validation, report.previous_fingerprint is not None
    bars = []
    if features := [f for f in report.features if f.missing_rate or f.previous_missing_rate]:
        bars.append(
            _Bars(
                [f.name for f in features],
                [f.missing_rate for f in features],
                limits.missing_rate,
                "Missing (% of records)",
                "Share of train records without a value.",
                second=[f.previous_missing_rate for f in features] if compared else None,
                percent=True,
            )
        )
    if features := [f for f in report.features if f.unseen_id_rate is not None or f.unseen_by_previous is not None]:
        against = ", and ids of train that the previous run never trained" if compared else ""
        bars.append(
            _Bars(
                [f.name for f in features],
                [f.unseen_id_rate for f in features],
                limits.unseen_id_rate,
                "Unseen ids (% of occurrences)",
                f"Ids of test that train never saw{against}.",
                second=[f.unseen_by_previous for f in features] if compared else None,
                names=("test, against train", "train, against the previous run"),
                percent=True,
            )
        )
    title = build.heading("Missing values and unseen ids")
    return [title, build.grid([bar.figure() for bar in bars])] if bars else []


def _drift(report: ValidationReport, config: Config) -> list[Html]:
    title = build.heading("Drift against the previous run")
    features = [f for f in report.features if f.js_divergence is not None]
    if not features:
        return [title, build.paragraph("No feature could be compared.")]
    names = [f.name for f in features]
    js = _Bars(
        names,
        [f.js_divergence for f in features],
        config.validation.js_divergence,
        "Jensen-Shannon divergence (bits)",
        "Change of the distribution of values in train: 0 is equal, 1 is disjoint.",
        noise=[f.js_noise for f in features],
        names=("divergence", ""),
    )
    psi = _Bars(
        names,
        [f.psi for f in features],
        config.validation.psi,
        "Population stability index",
        "The same change as an index: below 0.1 is usually read as no change, above 0.25 as a large one.",
        noise=[f.psi_noise for f in features],
        names=("index", ""),
    )
    return [title, build.grid([js.figure(), psi.figure()])]


def _distributions(report: ValidationReport, manifest: Manifest, before: Manifest | None) -> list[Html]:
    """The features that changed most (or the first ones), each with the previous run where it can be compared."""
    train = manifest.splits.get("train")
    if train is None or not report.features:
        return []
    features = sorted(report.features, key=lambda f: -(f.js_divergence or 0.0))
    figures = []
    for feature in features[:MAX_HISTOGRAMS]:
        # Distances exist only if both runs counted the feature alike.
        then = before.splits.get("train") if before is not None and feature.js_divergence is not None else None
        caption = feature.name
        if then is not None:
            caption += f": Jensen-Shannon {build.number(feature.js_divergence)} bits, PSI {build.number(feature.psi)}"
        if feature.kind == "dense":
            plot = _histogram(train.dense[feature.name], None if then is None else then.dense[feature.name])
        else:
            ours, theirs = train.slots[feature.name], None if then is None else then.slots[feature.name]
            plot = _top_values(ours, theirs)
            if theirs is not None and any(value not in dict(theirs.top) for value, _ in ours.top[:TOP_VALUES]):
                caption += f". No second bar: not among the previous run's {len(theirs.top)} most frequent values"
        figures.append(build.figure(build.draw(plot, width=5.6, height=2.9 if feature.kind == "dense" else 3.3), caption))
    more = len(features) > MAX_HISTOGRAMS
    text = f"The {MAX_HISTOGRAMS} {'features that changed most' if before is not None else 'first features'} of {len(features)}."
    return [build.heading("Distributions in train"), *([build.paragraph(text)] if more else []), build.grid(figures)]


def _histogram(ours: DenseStatistics, theirs: DenseStatistics | None) -> Callable[[Any], None]:
    """Shares of values per bucket, over the buckets in use."""
    runs = [("this run", ours), *([("previous run", theirs)] if theirs is not None else [])]
    shares = np.array([100 * np.asarray(run.counts, np.float64) / max(sum(run.counts), 1) for _, run in runs])
    used = np.flatnonzero(shares.sum(axis=0))
    first, last = (int(used[0]), int(used[-1])) if len(used) else (0, 0)

    def plot(axes: Any) -> None:
        bounds = np.arange(first, last + 2)
        axes.stairs(shares[0][first : last + 1], bounds, fill=True, alpha=0.3, color=build.PALETTE[0])
        for i, (name, _) in enumerate(runs):
            axes.stairs(shares[i][first : last + 1], bounds, color=build.PALETTE[i], linewidth=1.6, label=name)
        inner = [i for i in range(first + 1, last + 1) if i <= len(ours.edges)]
        step = max(1, -(-len(inner) // 7))
        axes.set_xticks(inner[::step], [f"{ours.edges[i - 1]:.3g}" for i in inner[::step]])
        axes.set_xlim(first, last + 1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("Value (uneven buckets)")
        axes.set_ylabel("Values (%)")
        if theirs is not None:
            axes.legend(fontsize=9)

    return plot


def _top_values(ours: SlotStatistics, theirs: SlotStatistics | None) -> Callable[[Any], None]:
    """Shares of the most frequent values of this run, and of the previous one where they are among its most frequent."""
    top = ours.top[:TOP_VALUES]

    def plot(axes: Any) -> None:
        rows = np.arange(len(top))[::-1]
        shift, height = (0.0, 0.62) if theirs is None else (0.19, 0.36)
        axes.barh(rows + shift, [100 * n / max(ours.ids, 1) for _, n in top], height, color=build.PALETTE[0], label="this run")
        if theirs is not None:
            then = dict(theirs.top)
            shares = [100 * then.get(value, 0) / max(theirs.ids, 1) for value, _ in top]
            axes.barh(rows - shift, shares, height, color=build.PALETTE[1], label="previous run")
            axes.legend(fontsize=9, loc="lower right")
        axes.set_yticks(rows, [build.figure_text(value) or "(missing)" for value, _ in top], fontsize=9)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("Occurrences (%), most frequent values")

    return plot


def _feature_table(report: ValidationReport) -> Html:
    compared = report.previous_fingerprint is not None
    shares = [
        "Missing",
        *(["Missing, previous run"] if compared else []),
        "Unseen in test",
        *(["Unseen by previous run"] if compared else []),
    ]
    drift = ["JS (bits)", "PSI", "PSI noise"] if compared else []
    rows: list[list[build.Cell]] = []
    for f in report.features:
        numbers = [f.missing_rate, f.previous_missing_rate, f.unseen_id_rate, f.unseen_by_previous]
        row: list[build.Cell] = [f.name, "numeric" if f.kind == "dense" else "slot"]
        row += [None if share is None else build.percent(share) for share in (numbers if compared else numbers[::2])]
        rows.append([*row, *([f.js_divergence, f.psi, f.psi_noise] if compared else [])])
    caption = "Missing: of train records. Unseen: of id occurrences." + (" Noise: what sampling alone would give." if compared else "")
    return build.table(["Feature", "Kind", *shares, *drift], rows, caption=caption, right=shares)


def _method(compared: bool) -> list[Html]:
    if not compared:
        return []
    text = (
        build.paragraph(
            "Values of both runs are counted in the same buckets: numeric features between the manifest's fixed edges, ids by the "
            "top six bits of their signs (64 buckets). Missing values are in no bucket. With counts c (sum n) and d (sum m):"
        ),
        build.paragraph(build.code("JS = ½ Σ p log2(p/w) + ½ Σ q log2(q/w),  p = c/n, q = d/m, w = (p+q)/2"), " in bits, unsmoothed;"),
        build.paragraph(
            build.code("PSI = Σ (p−q) ln(p/q),  p = (c+½)/(n+K/2), q = (d+½)/(m+K/2)"), " over the K buckets used in either run;"
        ),
        build.paragraph(
            build.code("noise: PSI ≈ (K−1)(1/n+1/m),  JS ≈ (K−1)(1/n+1/m)/(8 ln 2)"), " between two samples of one distribution."
        ),
    )
    return [build.details("How drift is computed", *text)]
