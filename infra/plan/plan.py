"""From a configuration, or a preset's name, to its plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from infra import local
from infra.plan.alternatives import Alternatives, alternatives_of
from infra.plan.catalogue import MachineType, machine_type
from infra.plan.costs import ASSUMPTIONS, measured_on
from infra.plan.estimate import Estimate, estimate, problem_of, this_machine, zone_candidates
from infra.plan.notes import notes_of
from infra.plan.shape import shape_of
from infra.plan.workload import Workload
from training.config import Config
from training.config_file import load_config
from training.data.manifest import Manifest
from training.errors import CapacityError, ConfigError

PRESETS: dict[str, str | None] = {"laptop": None, "one_gpu": "a2-highgpu-1g", "gke_small": None, "hundred_trillion": None}
"""Configurations in ``presets/``; with the machine that a run on one machine is planned for, None: this one."""
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """What a configuration needs, and what would be otherwise."""

    estimate: Estimate
    alternatives: Alternatives
    zones: tuple[str, ...]
    """Candidates, by an old list; empty where nothing is known."""
    notes: tuple[str, ...]
    """What to keep in mind."""
    problem: str | None
    """Why it does not fit, and what would help."""

    def check(self) -> None:
        """Raises ``CapacityError`` where the tables do not fit."""
        if self.problem:
            raise CapacityError(self.problem)

    def to_json(self) -> str:
        """The whole plan; the format is stable within ``format_version``."""
        return json.dumps(_record(self), indent=1, allow_nan=False) + "\n"


def preset_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a preset. Raises ``ConfigError`` for an unknown one."""
    if name not in PRESETS:
        raise ConfigError([f"--preset {name}: no such preset; choose from {', '.join(PRESETS)}"])
    with resources.as_file(resources.files(__package__).joinpath("presets", f"{name}.yaml")) as path:
        return load_config(path, overrides)


def machine_for(config: Config, name: str | None, *, preset: str | None = None) -> MachineType | None:
    """The one machine of a local run: of the catalogue if named or the preset's, else this one. Raises ``ConfigError``."""
    if config.cluster.provider != "local":
        if name is not None:
            raise ConfigError([f"--machine {name}: only for a run on one machine; here cluster.pools names the machines"])
        return None
    name = name or PRESETS.get(preset or "")
    return machine_type(name, where="--machine") if name else this_machine(local.measure())


def make_plan(config: Config, *, data: Path | None = None, records: int | None = None, machine: MachineType | None = None) -> Plan:
    """The plan of a configuration.

    ``data`` is a preprocessed directory or its manifest.json, ``records`` those of the train split where there is none yet.
    Raises ``ConfigError`` for machines that are not in the catalogue, ``ManifestError`` for an unusable data directory. That tables do
    not fit is part of the plan.
    """
    if data is not None and data.name == "manifest.json":
        data = data.parent
    manifest = Manifest.load(data) if data is not None else None
    workload = Workload.of(config, manifest, records=records)
    found = estimate(workload, shape_of(config, machine), known=manifest is not None)
    zones = zone_candidates(found.shape)
    return Plan(found, alternatives_of(found), zones, notes_of(found, zones), problem_of(found))


def _record(plan: Plan) -> dict[str, Any]:
    found, step = plan.estimate, plan.estimate.throughput
    return {
        "format_version": FORMAT_VERSION,
        "name": found.workload.config.name,
        "config_digest": found.workload.config.digest,
        "data": found.workload.source,
        "fits": found.fits,
        "problem": plan.problem,
        "parameters": found.parameters,
        "tables": [{**asdict(table), "bytes_per_row": table.bytes_per_row, "fill": table.fill} for table in found.tables],
        "table_bytes": found.total_bytes,
        "needed_bytes_per_machine": found.needed_bytes,
        "usable_bytes_per_machine": found.usable_bytes,
        "pools": [
            {
                "role": pool.role,
                "processes": pool.processes,
                "machines": 1 if found.shape.shared else pool.machines,
                "machine_type": pool.machine.name,
                "price_region": pool.machine.region,
                "price_date": pool.machine.price_date,
                "price_source": pool.machine.source,
                "usd_per_hour": None if found.shape.shared else pool.usd_per_hour,
            }
            for pool in found.shape.pools
        ],
        "machines": found.shape.machines,
        "usd_per_hour": found.shape.usd_per_hour,
        "run": asdict(found.run) if found.run else None,
        "samples_per_second": step.samples_per_second,
        "step_seconds": step.step_seconds,
        "limits": [{"what": what, "seconds_per_step": seconds} for what, seconds in step.limits],
        "rank_parts": [{"what": what, "seconds_per_step": seconds} for what, seconds in step.rank_parts],
        "network_bytes_per_step": step.network_bytes,
        "reduce_bytes_per_step": step.reduce_bytes,
        "checkpoint_bytes": found.checkpoint_bytes,
        "checkpoint_seconds": found.checkpoint_seconds,
        "checkpoint_limits": [{"what": what, "seconds": seconds} for what, seconds in found.checkpoint_limits],
        "quotas": found.shape.quotas,
        "zones": list(plan.zones),
        "notes": list(plan.notes),
        "alternatives": asdict(plan.alternatives),
        "assumptions": {name: asdict(assumption) for name, assumption in ASSUMPTIONS.items()},
        "measured": measured_on(),
    }
