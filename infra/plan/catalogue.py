"""Machine types of Compute Engine with their size, network and list price, from ``machines.csv`` beside this file; and where they stand.

What a family can do is in ``infra.gke.machines``. Prices are list prices on demand, without disks, licences or discounts.
Sources, by the column ``source``:

- ``list``: vCPUs and memory from the machine-type list of the gcosts calculator (2026-08), bandwidth from Google's machine-family pages
  (2026-03), price from public price lists: us-central1 2026-02, europe-west4 2026-08 (a month over 730 hours). Cross-checked for two types.
- ``share of X``: a smaller member of X's family, whose prices go by vCPU, memory and GPU alike: X's price in proportion.
- empty: no public price was found. Such machines are planned with, but have no cost.
"""

from __future__ import annotations

import csv
import difflib
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

from infra.gke.machines import Gpus, family_of, gpus_of
from training.errors import ConfigError

GIB = 1024.0**3
_RESERVED_SHARES = ((4.0, 0.25), (4.0, 0.20), (8.0, 0.10), (112.0, 0.06), (float("inf"), 0.02))
"""GKE keeps these shares of a node's first, next, ... GiB for itself (documentation of GKE, node allocatable resources)."""
_EVICTION_GIB = 0.1
GPU_FLOPS = {
    "nvidia-tesla-a100": 19.5e12,
    "nvidia-a100-80gb": 19.5e12,
    "nvidia-h100-80gb": 67e12,
    "nvidia-h100-mega-80gb": 67e12,
    "nvidia-h200-141gb": 67e12,
    "nvidia-b200": 75e12,
    "nvidia-gb200": 80e12,
    "nvidia-l4": 30.3e12,
}
"""float32 without tensor cores, per second and GPU: data sheets."""
ZONES: dict[frozenset[str], tuple[str, ...]] = {
    frozenset({"m2-ultramem-416", "a2-highgpu-8g", "c2-standard-30"}): (
        "asia-northeast1-a",
        "asia-northeast3-a",
        "asia-northeast3-b",
        "europe-west4-a",
        "europe-west4-b",
        "us-central1-a",
        "us-central1-b",
        "us-central1-c",
        "us-east1-a",
        "us-west4-b",
    )
}
"""Zones that had all of these machine types at once, by a public list of 2023-05: candidates. Provisioning asks the cloud itself."""
ZONES_DATE = "2023-05"


@dataclass(frozen=True)
class MachineType:
    """A row of the catalogue, or this machine."""

    name: str
    vcpus: int
    memory_gib: float
    egress_gbps: float | None
    """Bandwidth out, gigabits per second; taken for both directions. None where not published."""
    tier_1_gbps: float | None
    """With Tier_1 networking, where there is such."""
    usd_per_hour: float | None
    region: str
    """Of the price."""
    price_date: str
    """Year and month of the price list."""
    source: str
    cores: int
    """Physical ones: two virtual CPUs share one."""
    node: bool = True
    """Whether it is a node of GKE, which keeps a part of its memory."""

    @property
    def gpus(self) -> Gpus | None:
        """Its GPUs; this machine is taken to have none."""
        return gpus_of(self.name) if self.name in catalogue() else None

    @property
    def price_of(self) -> str:
        """Region and date of the price list."""
        return f"{self.region} {self.price_date}" if self.region else "no public price"

    @property
    def gpu_flops(self) -> float | None:
        """Of one of its GPUs, per second, float32."""
        return GPU_FLOPS[self.gpus.type] if self.gpus else None

    @property
    def allocatable_bytes(self) -> float:
        """Memory that pods may have: GKE keeps a part of every node."""
        if not self.node:
            return self.memory_gib * GIB
        left, kept = self.memory_gib, _EVICTION_GIB
        for size, share in _RESERVED_SHARES:
            kept += share * min(left, size)
            left -= min(left, size)
        return (self.memory_gib - kept) * GIB

    def gbps(self, *, tier_1: bool) -> float | None:
        """Bandwidth of one direction."""
        return self.tier_1_gbps if tier_1 and self.tier_1_gbps is not None else self.egress_gbps


@lru_cache(maxsize=1)
def catalogue() -> dict[str, MachineType]:
    """All machine types by name, in the order of the file."""
    text = resources.files(__package__).joinpath("machines.csv").read_text(encoding="utf-8")
    return {row["name"]: _machine(row) for row in csv.DictReader(text.splitlines())}


def machine_type(name: str, *, where: str) -> MachineType:
    """One machine type. Raises ``ConfigError`` for one that the catalogue lacks; ``where`` is the setting that named it."""
    found = catalogue().get(name)
    if found is None:
        near = difflib.get_close_matches(name, catalogue(), n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the catalogue has {', '.join(catalogue())}"
        raise ConfigError([f"{where}: {name!r} is not in the catalogue of machine types, so nothing can be planned with it; {hint}"])
    return found


def memory_machines() -> list[MachineType]:
    """Machine types that could hold tables: 7 GiB of memory and more to a vCPU, no GPUs, with a price."""
    roomy = [m for m in catalogue().values() if family_of(m.name).kind != "gpu" and m.memory_gib >= 7.0 * m.vcpus]
    return [machine for machine in roomy if machine.usd_per_hour is not None]


def zones_of(names: set[str]) -> tuple[str, ...]:
    """Zones that are known to have had all these machine types; empty where that is not known."""
    return next((zones for types, zones in ZONES.items() if names <= types), ())


def _machine(row: dict[str, str]) -> MachineType:
    def number(key: str) -> float | None:
        return float(row[key]) if row[key] else None

    return MachineType(
        name=row["name"],
        vcpus=int(row["vcpus"]),
        memory_gib=float(row["memory_gib"]),
        egress_gbps=number("egress_gbps"),
        tier_1_gbps=number("tier_1_gbps"),
        usd_per_hour=number("usd_per_hour"),
        region=row["region"],
        price_date=row["price_date"],
        source=row["source"],
        cores=max(1, int(row["vcpus"]) // 2),
    )
