"""A plan as a page: one file without scripts, in the look of the other reports (``training.report``)."""

from __future__ import annotations

from typing import Any

from infra.plan.alternatives import Alternative
from infra.plan.catalogue import catalogue
from infra.plan.costs import ASSUMPTIONS, measured_on
from infra.plan.estimate import Estimate
from infra.plan.memory import TableMemory, size_text, usable_bytes
from infra.plan.plan import Plan
from infra.plan.text import duration, facts, headline, money, rate_text
from training import report as build
from training.report import PALETTE, Cell, Html


def plan_html(plan: Plan) -> str:
    """The whole plan with its alternatives, assumptions and sources."""
    found = plan.estimate
    verdict = build.badge("fits", "good") if found.fits else build.badge("does not fit", "bad")
    blocks = [build.paragraph(verdict, " ", plan.problem or "The tables fit."), _tiles(found), _facts(plan)]
    blocks += [build.heading("Tables"), _tables(found), build.heading("Machines"), _pools(found)]
    blocks += _sweep(plan)
    blocks += _alternatives(plan)
    blocks += [build.heading("What this rests on"), _assumptions(), build.paragraph(f"Measured costs: {measured_on()}.")]
    return build.page(f"Plan of {found.workload.config.name}", blocks, subtitle=headline(found))


def _tiles(found: Estimate) -> Html:
    price, run = found.shape.usd_per_hour, found.run
    return build.tiles(
        [
            ("Samples per second", rate_text(found.throughput.samples_per_second), f"limited by {found.throughput.limit}"),
            ("Memory of tables", size_text(found.total_bytes), f"{found.needed_bytes / found.usable_bytes:.0%} of what there is"),
            ("USD per hour", money(price), "list price on demand"),
            ("USD per run", money(run.usd) if run else "unknown", f"{run.hours:,.2f} hours" if run else "length unknown"),
            ("Checkpoint", duration(found.checkpoint_seconds), f"{size_text(found.checkpoint_bytes)}, at least"),
            ("Machines", f"{found.shape.machines:,}", ", ".join(sorted({pool.machine.name for pool in found.shape.pools}))),
        ]
    )


def _facts(plan: Plan) -> Html:
    return build.table(["", ""], facts(plan))


def _tables(found: Estimate) -> Html:
    names = ["table", "rows", "width", "format", "optimizer", "values", "state", "index", "unused places", "bytes per row", "total"]
    rows: list[list[Cell]] = [
        [t.name, t.rows, t.dim, t.row_dtype, t.optimizer, *_digits(t), size_text(t.total_bytes)] for t in found.tables
    ]
    caption = "Bytes per row at capacity. The index holds signs and recency; unused places let a table run full before it evicts."
    return build.table(names, rows, caption=caption, right=names[5:])


def _digits(table: TableMemory) -> list[Cell]:
    parts = (table.value_bytes, table.state_bytes, table.index_bytes, table.unused_bytes, table.bytes_per_row)
    return [f"{part:,.1f}" for part in parts]


def _pools(found: Estimate) -> Html:
    shared = found.shape.shared
    rows: list[list[Cell]] = []
    for pool in found.shape.pools:
        machine = pool.machine
        price = f"{machine.price_of}, {machine.source}" if machine.region else machine.price_of
        counts: list[Cell] = [pool.processes, 1 if shared else pool.machines]
        rows.append([pool.role, *counts, machine.name, None if shared else money(pool.usd_per_hour), price])
    return build.table(["role", "processes", "machines", "type", "USD/h", "price of"], rows, right=["USD/h"])


def _sweep(plan: Plan) -> list[Html]:
    """Memory, cost and throughput against the number of servers."""
    points, found = plan.alternatives.servers, plan.estimate
    if not points:
        return []
    servers = [point.servers for point in points]
    held = found.servers.each
    memory = [point.total_bytes / point.servers * min(held, point.servers) / 1e12 for point in points]
    name = found.servers.machine.name

    def mark(axes: Any) -> None:
        axes.axvline(found.servers.processes, color=PALETTE[4], linestyle=":", linewidth=1)
        axes.set_xlabel("parameter servers (dotted: as configured)")
        axes.set_xscale("log")
        axes.set_xticks(_ticks(servers), labels=[f"{tick:g}" for tick in _ticks(servers)])
        axes.minorticks_off()

    def memory_plot(axes: Any) -> None:
        axes.plot(servers, memory, color=PALETTE[0], marker=".")
        axes.axhline(usable_bytes(found.servers) / 1e12, color=PALETTE[1], label=f"room on {name}")
        axes.set(ylabel="TB of tables per machine", ylim=(0, None))
        axes.legend()
        mark(axes)

    def cost_plot(axes: Any) -> None:
        axes.plot(servers, [point.usd_per_hour or 0.0 for point in points], color=PALETTE[0], marker=".")
        axes.set(ylabel="USD per hour, all machines", ylim=(0, None))
        mark(axes)

    def speed_plot(axes: Any) -> None:
        axes.plot(servers, [point.samples_per_second / 1e6 for point in points], color=PALETTE[0], marker=".")
        axes.set(ylabel="million samples per second", ylim=(0, None))
        mark(axes)

    figures = [build.figure(build.draw(memory_plot), f"Memory of tables per machine against the number of servers ({name})")]
    if found.shape.usd_per_hour is not None:
        figures.append(build.figure(build.draw(cost_plot), "Cost against the number of servers, list price on demand"))
    figures.append(build.figure(build.draw(speed_plot), "Expected throughput against the number of servers"))
    return [build.heading("By number of parameter servers"), build.grid(figures)]


def _ticks(servers: list[int]) -> list[int]:
    """A few of the numbers, ends included."""
    step = max(1, (len(servers) - 1) // 5)
    return sorted({*servers[::step], servers[-1]})


def _alternatives(plan: Plan) -> list[Html]:
    own, cloud = plan.alternatives, not plan.estimate.shape.shared
    blocks = [build.heading("The same rows stored otherwise"), _chart(plan), _table(own.formats, cloud=cloud)]
    if own.widths:
        blocks += [build.heading("The same parameters in rows of other widths"), _table(own.widths, cloud=cloud)]
    if own.machines:
        blocks += [build.heading("Other machines for the parameter servers"), _table(own.machines, cloud=cloud)]
        blocks.append(build.details("Prices and their sources", _catalogue({one.machine for one in own.machines})))
    return blocks


def _chart(plan: Plan) -> Html:
    formats, found = plan.alternatives.formats, plan.estimate
    room = found.usable_bytes * (1 if found.shape.shared else found.servers.machines) / 1e12

    def plot(axes: Any) -> None:
        colours = [PALETTE[0] if one.fits_as_is else PALETTE[1] for one in formats]
        axes.barh([one.what for one in formats], [one.total_bytes / 1e12 for one in formats], color=colours)
        axes.axvline(room, color=PALETTE[4], linestyle="--", label="what the configured machines have")
        axes.set_xlabel("TB of tables")
        axes.invert_yaxis()
        axes.legend()

    return build.figure(build.draw(plot, width=9.0, height=3.4), "Memory of the same rows by format and optimizer; orange does not fit")


def _table(alternatives: tuple[Alternative, ...], *, cloud: bool) -> Html:
    names = ["", "bytes per row", "total", "fits as configured"]
    names += ["servers needed", "machines", "USD/h of all roles", "samples/s", "checkpoint, at least", "price of"] if cloud else []
    rows: list[list[Cell]] = []
    for one in alternatives:
        row: list[Cell] = [one.what, f"{one.bytes_per_row:,.1f}", size_text(one.total_bytes), one.fits_as_is]
        if cloud and one.possible:
            row += [one.servers, one.machines, money(one.usd_per_hour)]
            row += [rate_text(one.samples_per_second), duration(one.checkpoint_seconds), one.price_of]
        elif cloud:
            row += [None] * 6
        rows.append(row)
    return build.table(names, rows, right=[name for name in names if name not in ("", "fits as configured", "price of")])


def _catalogue(names: set[str]) -> Html:
    rows: list[list[Cell]] = [
        [m.name, m.vcpus, f"{m.memory_gib:,.0f}", m.egress_gbps, money(m.usd_per_hour), m.region, m.price_date, m.source]
        for m in catalogue().values()
        if m.name in names
    ]
    return build.table(["type", "vCPUs", "GiB", "Gbps out", "USD/h", "region", "price of", "source"], rows)


def _assumptions() -> Html:
    rows: list[list[Cell]] = [[name, f"{a.value:,.4g} {a.unit}".strip(), a.source] for name, a in ASSUMPTIONS.items()]
    return build.table(["name", "value", "source"], rows)
