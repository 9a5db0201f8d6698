"""Which machines a run has: a pool per role on a cluster, or one machine for all."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from infra.gang import RoleSpec
from infra.gke.machines import family_of, pool_problems
from infra.plan.catalogue import MachineType, machine_type
from training.config import Config
from training.errors import ConfigError
from training.job import ROLES, RoleName

MAX_NODES_PER_POOL = 1000
"""Of a node pool in one zone (documentation of GKE, quotas and limits)."""

MAX_SERVERS = 1024
"""Largest legal ``training.roles.parameter_server``; a test holds it against the configuration."""


@dataclass(frozen=True)
class Pool:
    """The machines of one role."""

    role: RoleName
    processes: int
    each: int
    """Processes that share a machine."""
    machine: MachineType
    tier_1: bool = False
    spot: bool = False

    @property
    def machines(self) -> int:
        """How many."""
        return -(-self.processes // self.each)

    @property
    def bytes_per_second(self) -> float:
        """Of one machine's network, each direction. Infinite where not published, and within one machine."""
        gbps = self.machine.gbps(tier_1=self.tier_1)
        return float("inf") if gbps is None else gbps * 1e9 / 8

    @property
    def usd_per_hour(self) -> float | None:
        """Of all its machines, list price on demand."""
        price = self.machine.usd_per_hour
        return None if price is None else price * self.machines

    @property
    def quotas(self) -> dict[str, int]:
        """Metrics of the region's quota that the machines count against, as far as the Compute API knows them."""
        family, gpus = family_of(self.machine.name), self.machine.gpus
        cpus = "PREEMPTIBLE_CPUS" if self.spot else family.cpu_quota
        found = {cpus: self.machines * self.machine.vcpus} if cpus else {}
        if gpus and gpus.quota:
            found[f"PREEMPTIBLE_{gpus.quota}" if self.spot else gpus.quota] = self.machines * gpus.count
        return found

    def sized(self, processes: int) -> Pool:
        """With another number of processes."""
        return replace(self, processes=processes)


def allowed(servers: Pool) -> bool:
    """Whether so many parameter servers can be configured and stand in one node pool."""
    return servers.processes <= MAX_SERVERS and servers.machines <= MAX_NODES_PER_POOL


@dataclass(frozen=True)
class Shape:
    """All machines of a run."""

    pools: tuple[Pool, ...]
    """In the order of ``ROLES``."""
    shared: bool
    """Whether one machine holds all roles."""

    def pool(self, role: RoleName) -> Pool:
        """One role's machines."""
        return next(pool for pool in self.pools if pool.role == role)

    def with_servers(self, pool: Pool) -> Shape:
        """With another pool of parameter servers."""
        return replace(self, pools=tuple(pool if own.role == pool.role else own for own in self.pools))

    @property
    def machines(self) -> int:
        """How many."""
        return 1 if self.shared else sum(pool.machines for pool in self.pools)

    @property
    def usd_per_hour(self) -> float | None:
        """List price on demand; None if a machine's price is unknown."""
        if self.shared:
            return self.pools[0].machine.usd_per_hour
        prices = [pool.usd_per_hour for pool in self.pools]
        return None if None in prices else sum(price for price in prices if price is not None)

    @property
    def quotas(self) -> dict[str, int]:
        """What the run takes of the region's quota, by metric; nothing on one machine."""
        total: Counter[str] = Counter()
        for pool in () if self.shared else self.pools:
            total.update(pool.quotas)
        return dict(total)

    @property
    def cores(self) -> int:
        """Of the one machine, or of all."""
        return self.pools[0].machine.cores if self.shared else sum(pool.machines * pool.machine.cores for pool in self.pools)


def shape_of(config: Config, machine: MachineType | None) -> Shape:
    """The machines of a configuration; ``machine`` is the one of a run on one machine. Raises ``ConfigError``."""
    roles, cluster = config.training.roles, config.cluster
    if cluster.provider == "local":
        assert machine is not None
        counts = {role: int(getattr(roles, role)) for role in ROLES}
        return Shape(tuple(Pool(role, counts[role], counts[role], machine) for role in ROLES), shared=True)
    assert cluster.pools is not None
    pools: list[Pool] = []
    problems: list[str] = []
    for role in ROLES:
        own, path = getattr(cluster.pools, role), f"cluster.pools.{role}"
        found = machine_type(own.machine_type, where=f"{path}.machine_type")
        spec = RoleSpec(role, int(getattr(roles, role)), own)
        problems += pool_problems(spec, cluster)
        if own.tier_1 and found.tier_1_gbps is None and family_of(found.name).tier_1:
            problems.append(f"{path}.tier_1: the catalogue knows no Tier_1 networking of {found.name}; remove it, or take a larger machine")
        pools.append(Pool(role, spec.processes, own.processes_per_machine, found, own.tier_1, own.spot))
    if problems:
        raise ConfigError(problems)
    return Shape(tuple(pools), shared=False)
