"""What a batch is: ids, different ids, values, bytes, the dense network's work; by the configuration and, if there is one, a manifest."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

from infra.plan.costs import assumed
from training.config import CategoricalFeature, Config
from training.data.manifest import Manifest
from training.embedding.slots import TableSpec, slots, tables
from training.errors import ManifestError

SIGN_BYTES, FLOAT_BYTES = 8, 4
_EXACT_IDS = 4096
"""So many of the most frequent ids are counted one by one, the rest in bands of nearly equal frequency."""
_BANDS = 400
_FLOPS_PER_WEIGHT = 2.0
"""A multiplication and an addition per record; backward takes twice as many again."""


@dataclass(frozen=True)
class SlotLoad:
    """A slot in the data."""

    name: str
    table: int
    """Index into ``Workload.tables``."""
    group: str
    dim: int
    ids_per_record: float
    distinct: float
    """Different ids, of the train split or as assumed."""


@dataclass(frozen=True)
class Batch:
    """What one rank's batch of one step brings along."""

    records: int
    ids: float
    unique: tuple[float, ...]
    """Different signs, by table."""
    expanded: float
    """Values of all ids' rows, before pooling."""
    pooled: float
    """Values of the vectors that the rank gets."""
    unique_values: float
    """Values of the different signs' rows."""
    wire_bytes: int
    """Of a value between processes."""
    dense_bytes: float
    """Dense inputs and labels."""

    @property
    def unique_total(self) -> float:
        """Different signs over all tables."""
        return sum(self.unique)

    @property
    def ids_bytes(self) -> float:
        """From loader to embedding worker."""
        return SIGN_BYTES * self.ids

    @property
    def vector_bytes(self) -> float:
        """From worker to rank, and of their gradients back."""
        return self.wire_bytes * self.pooled

    @property
    def row_bytes(self) -> float:
        """Rows from all servers to the worker, and of their gradients back, without the signs."""
        return self.wire_bytes * self.unique_values

    @property
    def network_bytes(self) -> float:
        """All that one rank's step sends between roles, without the all-reduce: ids, dense part, and rows and vectors both ways."""
        signs = 2 * SIGN_BYTES * self.unique_total
        return self.ids_bytes + self.dense_bytes + signs + 2 * (self.row_bytes + self.vector_bytes)


@dataclass(frozen=True)
class Workload:
    """What is trained on what."""

    config: Config
    tables: tuple[TableSpec, ...]
    slots: tuple[SlotLoad, ...]
    records: int | None
    """Of the train split; None where nobody said."""
    source: str
    """Where the figures of the data come from."""

    @classmethod
    def of(cls, config: Config, manifest: Manifest | None = None, *, records: int | None = None) -> Workload:
        """With the figures of a manifest, or assumed ones: full tables, evenly shared by their slots. ``records`` overrides its own.

        Raises ``ManifestError`` for data with other slots.
        """
        specs, resolved = tables(config), slots(config)
        if manifest is not None:
            _check_same_slots(manifest, [slot.name for slot in resolved])
        features = {feature.name: feature for feature in config.schema_.categorical}
        statistics = manifest.splits["train"].slots if manifest is not None and "train" in manifest.splits else {}
        loads = []
        for slot in resolved:
            found = statistics.get(slot.name)
            sharing = len({other.group for other in resolved if other.table == slot.table})
            ids = found.ids / max(1, found.rows) if found else _assumed_ids(features[slot.name])
            distinct = float(found.distinct) if found else _assumed_distinct(features[slot.name], specs[slot.table], sharing)
            loads.append(SlotLoad(slot.name, slot.table, slot.group, slot.dim, ids, max(1.0, distinct)))
        source = "assumed: full tables, ids after Zipf" if manifest is None else f"manifest {manifest.fingerprint[:12]}"
        if records is None and manifest is not None:
            records = manifest.rows("train")
        return cls(config, specs, tuple(loads), records, source)

    def distinct(self, table: int) -> float:
        """Different signs of a table in the train split: the sum over its groups, each with its largest slot, at least."""
        groups: dict[str, float] = {}
        for slot in self.slots:
            if slot.table == table:
                groups[slot.group] = max(groups.get(slot.group, 0.0), slot.distinct)
        return sum(groups.values())

    def batch(self) -> Batch:
        """One rank's batch of one step."""
        config = self.config
        records = config.training.batch_size
        unique = [0.0] * len(self.tables)
        for slot in self.slots:
            unique[slot.table] += different_ids(slot.distinct, records * slot.ids_per_record, assumed("ids_alpha"))
        return Batch(
            records=records,
            ids=records * sum(slot.ids_per_record for slot in self.slots),
            unique=tuple(unique),
            expanded=records * sum(slot.ids_per_record * slot.dim for slot in self.slots),
            pooled=float(records * sum(slot.dim for slot in self.slots)),
            unique_values=sum(count * spec.dim for count, spec in zip(unique, self.tables, strict=True)),
            wire_bytes=2 if config.training.wire_dtype == "float16" else 4,
            dense_bytes=float(records * (len(config.schema_.dense) + 1) * FLOAT_BYTES),
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """Weights of the dense network's layers, in the order of forward."""
        model, dims = self.config.model, [slot.dim for slot in self.slots]
        num_dense = len(self.config.schema_.dense)
        bottom: tuple[int, ...] = ()
        if model.name == "dlrm":
            vectors = len(dims) + bool(num_dense)
            bottom = _mlp(num_dense, [*model.bottom_hidden, dims[0]]) if num_dense else ()
            width = (dims[0] if num_dense else 0) + vectors * (vectors - 1) // 2
        elif model.name == "deepfm":
            width = num_dense + len(dims) * (dims[0] - 1)
        else:
            width = num_dense + sum(dims)
        return bottom + _mlp(width, [*model.hidden, 1])

    @property
    def forward_flops(self) -> float:
        """Of the dense network, per record; backward takes twice as many."""
        model, dims = self.config.model, [slot.dim for slot in self.slots]
        pairs = (len(dims) + bool(self.config.schema_.dense)) ** 2 * dims[0] if model.name == "dlrm" else 0
        return _FLOPS_PER_WEIGHT * (sum(self.layers) + pairs)

    @property
    def steps(self) -> int | None:
        """Of the whole run, if that is known."""
        training = self.config.training
        if self.records is None:
            return training.max_steps
        epoch = -(-self.records // (training.batch_size * training.roles.nn_worker))
        return min(training.epochs * epoch, training.max_steps or training.epochs * epoch)


@lru_cache(maxsize=4096)
def different_ids(num_ids: float, draws: float, alpha: float) -> float:
    """How many different ids are expected among ``draws`` from ``num_ids``, whose frequency falls with rank to the power ``alpha``.

    The law is continuous between ranks: id k has the share of [k, k + 1) in the density x to the power -alpha over [1, num_ids + 1).
    """
    if num_ids <= 1.0 or draws <= 0.0:
        return min(max(num_ids, 0.0), max(draws, 0.0))
    last = num_ids + 1.0
    exact = min(_EXACT_IDS, int(num_ids))
    edges = [float(k) for k in range(1, exact + 2)]
    if last > edges[-1]:
        step = math.log(last / edges[-1]) / _BANDS
        edges += [edges[-1] * math.exp(step * (i + 1)) for i in range(_BANDS - 1)] + [last]
    total = _area(1.0, last, alpha)
    expected = 0.0
    for low, high in itertools.pairwise(edges):
        width = high - low
        share = _area(low, high, alpha) / total / width
        expected += width * -math.expm1(draws * math.log1p(-min(share, 1.0 - 1e-15)))
    return expected


def _area(low: float, high: float, alpha: float) -> float:
    if alpha == 1.0:
        return math.log(high / low)
    power = 1.0 - alpha
    return float((high**power - low**power) / power)


def _mlp(width: int, hidden: list[int]) -> tuple[int, ...]:
    return tuple(a * b for a, b in itertools.pairwise([width, *hidden]))


def _check_same_slots(manifest: Manifest, wanted: list[str]) -> None:
    found = [slot.name for slot in manifest.slots]
    if set(found) != set(wanted):
        lacking, more = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
        differ = "; ".join(f"{what} {', '.join(names)}" for what, names in (("without", lacking), ("beside", more)) if names)
        raise ManifestError(
            f"the data of {manifest.name} have other slots than the configuration ({differ}); run `satrap preprocess` with it"
        )


def _assumed_ids(feature: CategoricalFeature) -> float:
    return max(1.0, assumed("multi_valued_share") * feature.max_ids) if feature.multi_valued else 1.0


def _assumed_distinct(feature: CategoricalFeature, spec: TableSpec, sharing: int) -> float:
    if feature.bucketise is not None:
        return float(feature.bucketise.quantiles or len(feature.bucketise.boundaries) + 1)
    return spec.capacity_rows / sharing
