"""What of a machine the pod that fills it may ask for: a little less than GKE leaves. Pure, offline.

Source of what GKE keeps: "Plan GKE node sizes" in the documentation of Google Cloud, read 2026-12; of the machines: the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra.gang import RoleSpec
from infra.plan.catalogue import GIB, machine_type
from training.errors import ConfigError

_RESERVED_CPUS = ((1.0, 0.06), (1.0, 0.01), (2.0, 0.005), (float("inf"), 0.0025))
"""Shares of the first, next, ... vCPU that GKE keeps."""
_MARGIN = 0.03
"""Of the memory: the kernel's own share (1.6 % for its page tables) is not in GKE's formula."""
_DAEMONS_GIB, _DAEMONS_CPUS = 1.0, 1.0
"""For the pods that GKE runs on every node and the side-car that mounts the bucket."""


@dataclass(frozen=True)
class Size:
    """CPUs and memory."""

    cpus: float
    memory_gib: float


def allocatable(name: str, *, where: str) -> Size:
    """What GKE leaves of a machine type for pods. Raises ``ConfigError`` for one that the catalogue lacks; ``where`` is the setting."""
    machine = machine_type(name, where=where)
    cpus, left = float(machine.vcpus), float(machine.vcpus)
    for width, share in _RESERVED_CPUS:
        cpus -= share * min(left, width)
        left -= min(left, width)
    return Size(cpus, machine.allocatable_bytes / GIB)


def process_size(role: RoleSpec) -> Size:
    """What each role process of a pod may ask for, so that the pod fills its machine and still fits beside the node's own pods.

    Raises ``ConfigError`` where nothing would be left.
    """
    settings, where = role.pool, f"cluster.pools.{role.role}.machine_type"
    left, each = allocatable(settings.machine_type, where=where), settings.processes_per_machine
    memory = (left.memory_gib - settings.huge_pages_gib) * (1 - _MARGIN) - _DAEMONS_GIB
    size = Size((left.cpus - _DAEMONS_CPUS) / each, memory / each)
    if size.cpus < 0.1 or size.memory_gib < 0.25:
        raise ConfigError(
            [
                f"{where}: {settings.machine_type} leaves {max(size.cpus, 0):.2f} CPUs and {max(size.memory_gib, 0):.2f} GiB for each of "
                f"{each} processes: choose a larger machine, fewer processes_per_machine or fewer huge_pages_gib"
            ]
        )
    return size
