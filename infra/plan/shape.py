"""Which machines a run has: a pool per role on a cluster, or one machine for all."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infra.plan.catalogue import MachineType, machine_type
from training.config import Config
from training.errors import ConfigError
from training.job import ROLES, RoleName

MAX_NODES_PER_POOL = 1000
"""Of a node pool in one zone (documentation of GKE, quotas and limits)."""


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

    def sized(self, processes: int) -> Pool:
        """With another number of processes."""
        return replace(self, processes=processes)


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
    pools = []
    for role in ROLES:
        own = getattr(cluster.pools, role)
        found = machine_type(own.machine_type, where=f"cluster.pools.{role}.machine_type")
        pools.append(Pool(role, int(getattr(roles, role)), own.processes_per_machine, found, own.tier_1, own.spot))
    _check_gpus(pools)
    return Shape(tuple(pools), shared=False)


def _check_gpus(pools: list[Pool]) -> None:
    """More ranks on a machine than it has GPUs would share one."""
    for pool in pools:
        gpus = pool.machine.gpus
        if pool.role == "nn_worker" and gpus is not None and pool.each > gpus.count:
            raise ConfigError(
                [
                    f"cluster.pools.nn_worker.processes_per_machine: {pool.each} ranks on a {pool.machine.name}, "
                    f"which has {gpus.count} GPUs; give {gpus.count} or fewer"
                ]
            )
