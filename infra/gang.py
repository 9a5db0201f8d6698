"""The gang of one run, resolved: which pods of which role on which machines, under which names and labels.

One ``Gang`` feeds everything that plans, provisions, launches and releases, so that they cannot disagree. Pure: no cloud, no clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from training.config import Config, PoolConfig
from training.errors import ConfigError
from training.job import ROLES, RoleName

RUN, OWNER, EXPIRES, ROLE = "satrap-run", "satrap-owner", "satrap-expires", "satrap-role"
"""Labels of everything a run makes. ``satrap-expires`` is UTC as 20261201t1830z: label values allow no colons or capitals."""
BASE_PORT = 7700
"""Port of a pod's first role process; the next process has the next."""
PREFIX = "satrap-"
_EXPIRES_FORMAT = "%Y%m%dt%H%Mz"
SHORT = {"parameter_server": "ps", "embedding_worker": "ew", "data_loader": "dl", "nn_worker": "nn"}
"""Roles in the names of pods and pools: a pod's name must fit a DNS label of 63 characters."""


@dataclass(frozen=True)
class RoleSpec:
    """The pods of one role: one pod to a machine."""

    role: RoleName
    processes: int
    pool: PoolConfig

    @property
    def pods(self) -> int:
        """Machines, and pods, of the role."""
        return -(-self.processes // self.pool.processes_per_machine)

    @property
    def short(self) -> str:
        """The role in names."""
        return SHORT[self.role]

    @property
    def node_labels(self) -> dict[str, str]:
        """Label of the role's nodes, and the key and value of their NoSchedule taint: pods select the one and tolerate the other."""
        return {ROLE: self.role}

    def indices(self, pod: int) -> range:
        """Indices of the role processes in a pod."""
        each = self.pool.processes_per_machine
        return range(pod * each, min(self.processes, (pod + 1) * each))


@dataclass(frozen=True)
class Gang:
    """All pods of a run, which start together or not at all."""

    run: str
    """Name of cluster, JobSet and label: ``satrap-`` and the run's id as a DNS label, at most 40 characters."""
    owner: str
    expires: datetime
    """UTC, whole minutes. Whatever carries the run's label after it may be deleted."""
    roles: tuple[RoleSpec, ...]
    """In the order of ``ROLES``."""

    @property
    def labels(self) -> dict[str, str]:
        """What every resource of the run carries."""
        return {RUN: self.run, OWNER: self.owner, EXPIRES: self.expires.strftime(_EXPIRES_FORMAT)}

    def role(self, name: RoleName) -> RoleSpec:
        """One role's pods."""
        return next(role for role in self.roles if role.role == name)

    def host(self, role: RoleName, index: int) -> str:
        """DNS name of the pod that holds a role process: ``<jobset>-<role>-0-<pod>.<subdomain>`` in the pods' own namespace."""
        spec = self.role(role)
        return f"{self.run}-{spec.short}-0-{index // spec.pool.processes_per_machine}.{self.run}"

    def port(self, role: RoleName, index: int) -> int:
        """Port of a role process within its pod."""
        return BASE_PORT + index % self.role(role).pool.processes_per_machine


def gang_of(config: Config, run_id: str, *, now: datetime) -> Gang:
    """The gang of a configuration. Raises ``ConfigError`` without ``cluster.pools``. ``now`` is UTC."""
    cluster = config.cluster
    if cluster.pools is None:
        raise ConfigError(["cluster.pools: a cluster needs machines per role; give them, or take a preset: satrap plan --preset gke_small"])
    expires = (now + timedelta(hours=cluster.max_run_hours)).replace(second=0, microsecond=0) + timedelta(minutes=1)
    specs = tuple(RoleSpec(role, int(getattr(config.training.roles, role)), getattr(cluster.pools, role)) for role in ROLES)
    return Gang(run=run_name(run_id), owner=cluster.owner, expires=expires, roles=specs)


def run_name(run_id: str) -> str:
    """A run's id as a DNS label of at most 40 characters. Raises ``ConfigError`` where nothing usable is left."""
    name = re.sub(r"[^a-z0-9]+", "-", run_id.lower().removeprefix(PREFIX)).strip("-")
    if not name:
        raise ConfigError([f"run id {run_id!r}: needs a letter or digit; it becomes a DNS name"])
    return f"{PREFIX}{name[: 40 - len(PREFIX)].rstrip('-')}"


def expiry_of(labels: dict[str, str]) -> datetime | None:
    """When the time of a resource is over, UTC, by its label; None without one that can be read."""
    try:
        return datetime.strptime(labels[EXPIRES], _EXPIRES_FORMAT).replace(tzinfo=UTC)
    except (KeyError, ValueError):
        return None


def expired(labels: dict[str, str], now: datetime) -> bool:
    """Whether a resource's label says that its time is over. One with a label nobody can read is not ours to judge: false."""
    end = expiry_of(labels)
    return end is not None and end < now
