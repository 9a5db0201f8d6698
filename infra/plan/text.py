"""A plan for the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from infra.plan.alternatives import Alternative
from infra.plan.catalogue import ZONES_DATE
from infra.plan.costs import measured_on
from infra.plan.estimate import Estimate
from infra.plan.memory import size_text
from infra.plan.plan import Plan

WIDTH = 140
"""Of running text."""
SHOWN_MACHINES = 8
"""Of the memory machines, the cheapest; all are in the JSON and HTML."""


def plan_text(plan: Plan) -> str:
    """The whole plan."""
    found = plan.estimate
    parts = [headline(found), tables_text(found), roles_text(found), "\n".join(_wrapped(name, text) for name, text in facts(plan))]
    parts += _alternatives(plan)
    parts.append(f"measured costs: {measured_on()}; assumptions and sources: --json")
    return "\n\n".join(parts)


def _wrapped(name: str, text: str) -> str:
    return textwrap.fill(f"{name:<11} {text}", WIDTH, subsequent_indent=" " * 12, break_long_words=False, break_on_hyphens=False)


def headline(found: Estimate) -> str:
    """What is planned, in one line."""
    cluster, training = found.workload.config.cluster, found.workload.config.training
    place = f"{cluster.provider} {cluster.zone}" if not found.shape.shared else found.servers.machine.name
    machines = f"{found.shape.machines} machine{'s' if found.shape.machines > 1 else ''}"
    return f"{found.workload.config.name}: {count_text(found.parameters)} parameters, mode {training.mode}, {machines} ({place})"


def tables_text(found: Estimate) -> str:
    """Memory by table."""
    rows = [
        [
            *(t.name, f"{t.rows:,}", str(t.dim), t.row_dtype),
            *(f"{t.value_bytes:.0f}", f"{t.state_bytes:.0f}", f"{t.index_bytes:.1f}", f"{t.unused_bytes:.1f}", f"{t.bytes_per_row:.1f}"),
            *(f"{t.fill:.0%}", size_text(t.total_bytes), _seen(t.distinct, t.rows)),
        ]
        for t in found.tables
    ]
    names = ["TABLE", "ROWS", "WIDTH", "FORMAT", "VALUES", "STATE", "INDEX", "UNUSED", "BYTES/ROW", "FILL", "TOTAL", "SIGNS IN TRAIN"]
    return aligned(names, rows, left={0, 3})


def roles_text(found: Estimate) -> str:
    """Machines by role."""
    shared = found.shape.shared
    rows = [
        [pool.role, str(pool.processes), "1, shared" if shared else str(pool.machines), pool.machine.name]
        + (["", ""] if shared else [money(pool.usd_per_hour), pool.machine.price_of])
        for pool in found.shape.pools
    ]
    if not shared:
        rows.append(["all", "", str(found.shape.machines), "", money(found.shape.usd_per_hour), "list price on demand"])
    return aligned(["ROLE", "PROCESSES", "MACHINES", "TYPE", "USD/H", "PRICE OF"], rows, left={0, 3, 5})


def facts(plan: Plan) -> list[tuple[str, str]]:
    """What there is to know, name and text each."""
    found, step = plan.estimate, plan.estimate.throughput
    training = found.workload.config.training
    fits = "fits" if found.fits else "DOES NOT FIT"
    share = found.needed_bytes / found.usable_bytes
    shown = [
        (
            "memory",
            f"{size_text(found.needed_bytes)} of tables on a machine that has {size_text(found.usable_bytes)}: {fits} ({share:.0%})",
        ),
        ("network", f"{size_text(step.network_bytes)} a step between roles, {size_text(step.reduce_bytes)} all-reduced"),
        ("checkpoint", _checkpoint(found)),
        (
            "speed",
            f"{rate_text(step.samples_per_second)} samples/s expected: {step.step_seconds * 1e3:,.1f} ms for a step of "
            f"{training.roles.nn_worker} x {training.batch_size:,} records",
        ),
        ("limited by", limits_text(found)),
        ("nn workers", "a step of a rank: " + ", ".join(f"{name} {seconds * 1e3:,.1f} ms" for name, seconds in step.rank_parts)),
        ("by mode", ", ".join(f"{mode} {rate_text(rate)}" for mode, rate in plan.alternatives.modes.items()) + " samples/s"),
        ("cost", _cost(found)),
        ("run", run_text(found)),
    ]
    if not found.shape.shared:
        shown.append(("quota", ", ".join(f"{metric} {count:,}" for metric, count in found.shape.quotas.items()) or "none that is known"))
        zones = ", ".join(plan.zones) or "not known for these machine types together"
        shown.append(("zones", f"{zones} (list of {ZONES_DATE}; provisioning asks the cloud)" if plan.zones else zones))
    shown.append(("data", found.workload.source))
    return shown + [("note", note) for note in plan.notes]


def limits_text(found: Estimate) -> str:
    """What bounds a step, and what comes next."""
    first, *rest = found.throughput.limits
    text = f"{first[0]} ({first[1] * 1e3:,.1f} ms a step)"
    return text + "".join(f", then {name} ({seconds * 1e3:,.1f} ms)" for name, seconds in rest[:2])


def run_text(found: Estimate) -> str:
    """Length and price of the run."""
    run, cloud, max_hours = found.run, not found.shape.shared, found.workload.config.cluster.max_run_hours
    if run is None:
        text = "length unknown: give --data, --records or training.max_steps"
        price = found.shape.usd_per_hour
        return (
            text
            if price is None or not cloud
            else f"{text}; at most {max_hours:g} h, {money(max_hours * price)} USD (cluster.max_run_hours)"
        )
    text = f"{run.hours:,.2f} hours for {count_text(run.records)} samples ({run.steps:,} steps, checkpoints: {run.checkpoints})"
    if run.usd is not None:
        text += f": {run.usd:,.2f} USD"
    if cloud and run.hours > max_hours:
        text += f"; longer than cluster.max_run_hours ({max_hours:g}): raise it, or everything is deleted before the end"
    return text


def _checkpoint(found: Estimate) -> str:
    name, seconds = found.checkpoint_limits[0]
    text = f"{size_text(found.checkpoint_bytes)}, at least {duration(seconds)}, limited by {name}"
    rest = "".join(f"; {other} alone would take {duration(least)}" for other, least in found.checkpoint_limits[1:])
    return text + rest


def _cost(found: Estimate) -> str:
    price, sample = found.shape.usd_per_hour, found.usd_per_million_samples
    if price is None or sample is None:
        lacking = sorted({pool.machine.name for pool in found.shape.pools if pool.machine.usd_per_hour is None})
        return "nothing: it is yours" if found.shape.shared else f"unknown: no public price of {', '.join(lacking)}"
    return f"{money(price)} USD/h, {money(price * 24)} USD a day, {sample:,.3g} USD per million samples"


def _alternatives(plan: Plan) -> list[str]:
    own, found = plan.alternatives, plan.estimate
    parts = [f"The same rows stored otherwise\n{formats_text(own.formats, cloud=not found.shape.shared)}"]
    if own.widths:
        total = count_text(sum(table.parameters for table in found.tables))
        parts.append(f"The same {total} parameters in rows of other widths\n{widths_text(own.widths)}")
    if own.machines:
        parts.append(
            f"Other machines for the parameter servers, as many as hold the tables\n{machines_text(own.machines[:SHOWN_MACHINES])}"
        )
    return parts


def formats_text(alternatives: Sequence[Alternative], *, cloud: bool) -> str:
    """Formats and optimizers side by side."""
    rows = [
        [one.row_dtype, one.optimizer, f"{one.bytes_per_row:,.1f}", size_text(one.total_bytes), yes(one.fits_as_is)]
        + ([str(one.servers), money(one.usd_per_hour), duration(one.checkpoint_seconds)] if cloud else [])
        for one in alternatives
    ]
    names = ["FORMAT", "OPTIMIZER", "BYTES/ROW", "TOTAL", "FITS HERE", *(["SERVERS NEEDED", "USD/H", "CHECKPOINT"] if cloud else [])]
    return aligned(names, rows, left={0, 1})


def widths_text(alternatives: Sequence[Alternative]) -> str:
    """Widths down, formats across."""
    by_dim: dict[int, dict[str, Alternative]] = {}
    for one in alternatives:
        by_dim.setdefault(one.dim or 0, {})[one.row_dtype] = one
    kinds = list(dict.fromkeys(one.row_dtype for one in alternatives))
    names = ["WIDTH", *(f"{kind} {name}".upper() for kind in kinds for name in ("bytes/row", "total", "fits here"))]
    rows = [
        [str(dim)]
        + [
            cell
            for kind in kinds
            for cell in (f"{row[kind].bytes_per_row:,.1f}", size_text(row[kind].total_bytes), yes(row[kind].fits_as_is))
        ]
        for dim, row in sorted(by_dim.items())
    ]
    return aligned(names, rows, left=set())


def machines_text(alternatives: Sequence[Alternative]) -> str:
    """Machines down."""
    rows = [
        [
            *(one.what, str(one.machines), money(one.usd_per_hour), rate_text(one.samples_per_second)),
            *(duration(one.checkpoint_seconds), one.price_of),
        ]
        for one in alternatives
    ]
    return aligned(["MACHINE", "MACHINES", "USD/H OF ALL ROLES", "SAMPLES/S", "CHECKPOINT", "PRICE OF"], rows, left={0, 5})


def aligned(names: Sequence[str], rows: Sequence[Sequence[str]], *, left: set[int]) -> str:
    """A table of text; columns not in ``left`` are set right, empty ones left out."""
    used = [i for i in range(len(names)) if any(row[i] for row in rows)]
    widths = {i: max(len(names[i]), *(len(row[i]) for row in rows)) for i in used}

    def line(cells: Sequence[str]) -> str:
        return "  ".join(f"{cells[i]:<{widths[i]}}" if i in left else f"{cells[i]:>{widths[i]}}" for i in used).rstrip()

    return "\n".join(line(cells) for cells in [names, *rows])


def count_text(count: float) -> str:
    """A large number in words: 100 trillion."""
    for word, factor in (("trillion", 1e12), ("billion", 1e9), ("million", 1e6)):
        if count >= factor:
            return f"{count / factor:,.4g} {word}"
    return f"{count:,.0f}"


def rate_text(rate: float) -> str:
    """Samples per second."""
    return f"{rate / 1e6:,.2f} million" if rate >= 1e6 else f"{rate:,.0f}"


def duration(seconds: float) -> str:
    """A time for reading."""
    if seconds >= 5400.0:
        return f"{seconds / 3600.0:,.1f} h"
    return f"{seconds / 60.0:,.1f} min" if seconds >= 90.0 else f"{seconds:,.1f} s"


def money(usd: float | None) -> str:
    """USD to the cent."""
    return "unknown" if usd is None else f"{usd:,.2f}"


def yes(value: bool) -> str:
    """A word for a truth."""
    return "yes" if value else "no"


def _seen(distinct: float | None, rows: int) -> str:
    return "" if distinct is None else f"{distinct:,.0f} ({'all fit' if distinct <= rows else f'{rows / distinct:.0%} fit'})"
