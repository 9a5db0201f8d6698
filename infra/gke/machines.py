"""What a machine family of Compute Engine can do, as far as a node pool must know it; offline, by the machine type's name.

Sources: machine families, GKE compact placement, Tier_1 networking and Local SSD in the documentation of Google Cloud, read 2026-11.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from infra.gang import RoleSpec
from training.config import ClusterConfig
from training.errors import ConfigError

Kind = Literal["gpu", "cpu", "memory"]
"""In the order in which machines are asked for: GPUs are the scarcest, memory machines the dearest to let stand idle."""
KINDS: tuple[Kind, ...] = ("gpu", "cpu", "memory")


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    kind: Kind = "cpu"
    cpu_quota: str | None = None
    """Metric of the region's quota; None: only ``CPUS_PER_VM_FAMILY`` counts it, which the Compute API does not report."""
    compact: bool = False
    """GKE can place its nodes close together."""
    tier_1: bool = False
    """Tier_1 networking on machines with 30 or more vCPUs."""
    local_ssd: bool = False
    """The number of Local SSDs can be chosen."""
    spot: bool = True
    flex_start: bool = False
    """Dynamic Workload Scheduler hands it out."""
    disk_type: Literal["pd-balanced", "hyperdisk-balanced"] = "pd-balanced"
    """Newer families boot from Hyperdisk only."""


_HYPER: Literal["hyperdisk-balanced"] = "hyperdisk-balanced"
FAMILIES = {
    "e2": Family(cpu_quota="CPUS"),
    "n1": Family(cpu_quota="CPUS", local_ssd=True),
    "n2": Family(cpu_quota="N2_CPUS", compact=True, tier_1=True, local_ssd=True),
    "n2d": Family(cpu_quota="N2D_CPUS", compact=True, tier_1=True, local_ssd=True),
    "n4": Family(disk_type=_HYPER),
    "c2": Family(cpu_quota="C2_CPUS", compact=True, tier_1=True, local_ssd=True),
    "c2d": Family(cpu_quota="C2D_CPUS", compact=True, tier_1=True, local_ssd=True),
    "c3": Family(cpu_quota="C3_CPUS", compact=True, tier_1=True),
    "c3d": Family(compact=True, tier_1=True),
    "c4": Family(compact=True, tier_1=True, disk_type=_HYPER),
    "c4a": Family(compact=True, tier_1=True, disk_type=_HYPER),
    "c4d": Family(compact=True, tier_1=True, disk_type=_HYPER),
    "h3": Family(compact=True, spot=False),
    "h4d": Family(compact=True, flex_start=True, disk_type=_HYPER),
    "m1": Family("memory", "M1_CPUS", local_ssd=True),
    "m2": Family("memory", "M2_CPUS", spot=False),
    "m3": Family("memory", "M3_CPUS", tier_1=True, local_ssd=True),
    "m4": Family("memory", tier_1=True, spot=False, disk_type=_HYPER),
    "m4n": Family("memory", spot=False, disk_type=_HYPER),
    "x4": Family("memory", spot=False, disk_type=_HYPER),
    "a2": Family("gpu", "A2_CPUS", compact=True, local_ssd=True, flex_start=True),
    "a3": Family("gpu", "CPUS", compact=True, flex_start=True),
    "a4": Family("gpu", compact=True, flex_start=True, disk_type=_HYPER),
    "a4x": Family("gpu", compact=True, spot=False, disk_type=_HYPER),
    "g2": Family("gpu", "CPUS", compact=True, local_ssd=True, flex_start=True),
}
_GPU_TYPES = {
    "a2-highgpu": "nvidia-tesla-a100",
    "a2-megagpu": "nvidia-tesla-a100",
    "a2-ultragpu": "nvidia-a100-80gb",
    "a3-highgpu": "nvidia-h100-80gb",
    "a3-megagpu": "nvidia-h100-mega-80gb",
    "a3-ultragpu": "nvidia-h200-141gb",
    "a4-highgpu": "nvidia-b200",
    "a4x-highgpu": "nvidia-gb200",
    "g2-standard": "nvidia-l4",
}
_G2_GPUS = {4: 1, 8: 1, 12: 1, 16: 1, 24: 2, 32: 1, 48: 4, 96: 8}
"""GPUs of a g2-standard by its vCPUs; the other GPU machines say it in their names."""
_GPU_QUOTAS = {
    "nvidia-tesla-a100": "NVIDIA_A100_GPUS",
    "nvidia-a100-80gb": "NVIDIA_A100_80GB_GPUS",
    "nvidia-h100-80gb": "NVIDIA_H100_GPUS",
    "nvidia-l4": "NVIDIA_L4_GPUS",
}


@dataclass(frozen=True)
class Gpus:
    """The GPUs of a machine."""

    type: str
    count: int

    @property
    def quota(self) -> str | None:
        """Metric of the region's quota, None where the Compute API reports none."""
        return _GPU_QUOTAS.get(self.type)


def family_of(machine_type: str) -> Family:
    """The family of a machine type. Raises ``ConfigError`` for one that is not in the table."""
    name = machine_type.partition("-")[0]
    if name not in FAMILIES:
        raise ConfigError([f"machine type {machine_type!r}: unknown family {name!r}; known: {', '.join(FAMILIES)}"])
    return FAMILIES[name]


def gpus_of(machine_type: str) -> Gpus | None:
    """The GPUs that come with a machine type. Raises ``ConfigError`` where the name of a GPU machine does not tell."""
    if family_of(machine_type).kind != "gpu":
        return None
    kind, _, size = machine_type.rpartition("-")
    number = re.fullmatch(r"(\d+)g?", size)
    if kind not in _GPU_TYPES or number is None:
        raise ConfigError([f"machine type {machine_type!r}: unknown GPU machine; known: {', '.join(f'{name}-*' for name in _GPU_TYPES)}"])
    count = int(number[1])
    if kind == "g2-standard":
        if count not in _G2_GPUS:
            raise ConfigError([f"machine type {machine_type!r}: no such machine; g2-standard has {sorted(_G2_GPUS)} vCPUs"])
        count = _G2_GPUS[count]
    return Gpus(_GPU_TYPES[kind], count)


def pool_problems(role: RoleSpec, cluster: ClusterConfig) -> Iterator[str]:
    """What a role's machines cannot do of what is configured, with the setting that is wrong."""
    settings, path = role.pool, f"cluster.pools.{role.role}"
    try:
        family, gpus = family_of(settings.machine_type), gpus_of(settings.machine_type)
    except ConfigError as error:
        yield from (f"{path}.{line}" for line in error.problems)
        return
    for name, offered in (("compact", family.compact), ("tier_1", family.tier_1), ("local_ssds", family.local_ssd), ("spot", family.spot)):
        if getattr(settings, name) and not offered:
            yield f"{path}.{name}: {settings.machine_type} does not have it; remove it, or choose another machine"
    if gpus and role.role == "nn_worker" and settings.processes_per_machine != gpus.count:
        yield (
            f"{path}.processes_per_machine: {settings.processes_per_machine}, but {settings.machine_type} has {gpus.count} GPUs "
            f"and every rank takes one: set it to {gpus.count}"
        )
    if cluster.profile == "queued" and role.role == "nn_worker" and not family.flex_start:
        able = ", ".join(name for name, row in FAMILIES.items() if row.flex_start)
        yield f"{path}.machine_type: profile queued needs machines of DWS ({able}), not {settings.machine_type}; or take on_demand"
