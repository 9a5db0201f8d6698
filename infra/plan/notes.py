"""What to keep in mind with a plan: what it does not count, does not know, or would do otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator

from infra.plan.catalogue import ZONES_DATE
from infra.plan.estimate import SERVER_SPEED, Estimate


def notes_of(found: Estimate, zones: tuple[str, ...]) -> tuple[str, ...]:
    """One line each. ``zones`` are those that are known to have had all machine types."""
    return (*_of_data(found), *_of_speed(found), *_of_place(found, zones), *(() if found.shape.shared else _of_price(found)))


def _of_data(found: Estimate) -> Iterator[str]:
    for table in found.tables:
        if table.distinct is not None and table.distinct > table.rows:
            yield (
                f"{table.name}: the train split has {table.distinct:,.0f} different signs for {table.rows:,} rows; "
                "the least recently used will go, unless embedding.capacity_rows is raised"
            )


def _of_speed(found: Estimate) -> Iterator[str]:
    if found.shape.pool("nn_worker").machine.gpus:
        yield "a GPU's work is computed from its data sheet; the trainer itself computes on the processor so far"
    unknown = sorted({pool.machine.name for pool in found.shape.pools if math.isinf(pool.bytes_per_second)})
    if unknown and not found.shape.shared:
        yield f"the network of {', '.join(unknown)} is not published, so it does not limit here"
    (slowest, seconds), (_, next_seconds) = found.checkpoint_limits
    if slowest == SERVER_SPEED and seconds > 2.0 * next_seconds:
        yield "checkpoints are faster with several smaller servers on a machine (cluster.pools.parameter_server.processes_per_machine)"


def _of_place(found: Estimate, zones: tuple[str, ...]) -> Iterator[str]:
    zone = found.workload.config.cluster.zone
    if zones and zone not in zones:
        yield f"cluster.zone is {zone}, where the list of {ZONES_DATE} does not have all machine types"


def _of_price(found: Estimate) -> Iterator[str]:
    pools = found.shape.pools
    yield "not counted: fee and system nodes of the cluster, disks, storage, time until the machines are up, preprocessing"
    if found.workload.config.cluster.provider == "vertex":
        yield "prices are those of Compute Engine; Vertex AI adds a fee of its own"
    if any(pool.spot for pool in pools):
        yield "spot machines are counted at the price on demand"
    if any(pool.tier_1 for pool in pools):
        yield "the price of Tier_1 networking is not counted"
    regions = sorted({pool.machine.region for pool in pools} - {""})
    if len(regions) > 1:
        yield f"prices are of different regions: {', '.join(regions)}"
