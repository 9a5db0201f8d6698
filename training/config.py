"""The one description of a run: a frozen, typed tree read from a YAML file.

``training.config_file.load_config`` is the only way in. Unknown keys, wrong types and impossible combinations are refused with their path,
the value and the legal choices before anything starts. The resolved tree is stored with the run and in the checkpoint.

Here are the whole and the sections of what follows training; ``training.config_data`` has those of the data, ``training.config_training``
those of the model, ``training.config_cluster`` that of the machines. All are imported from here.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from training.config_cluster import ClusterConfig, PoolConfig
from training.config_data import (
    CategoricalFeature,
    DataConfig,
    DenseFeature,
    Fractions,
    LabelConfig,
    SchemaConfig,
    SplitConfig,
)
from training.config_section import SPLITS, Name, NonNegativeFloat, PositiveInt, Section, SplitName
from training.config_training import (
    EmbeddingConfig,
    InitializerConfig,
    ModelConfig,
    ScheduleConfig,
    SlotConfig,
    SparseOptimizerConfig,
    TrainingConfig,
)

__all__ = [
    "SPLITS",
    "CategoricalFeature",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DenseFeature",
    "Fractions",
    "GateConfig",
    "InitializerConfig",
    "LabelConfig",
    "MetricName",
    "ModelConfig",
    "PoolConfig",
    "ScheduleConfig",
    "SlotConfig",
    "SparseOptimizerConfig",
    "SplitConfig",
    "SplitName",
    "Threshold",
    "TrainingConfig",
]

MetricName = Literal["auc", "log_loss", "normalized_entropy", "calibration"]


class GateConfig(Section):
    """When a candidate becomes champion."""

    metric: MetricName = Field("auc", description="Metric compared on the test split.")
    min_value: float | None = Field(None, description="Worst acceptable value (a ceiling for log_loss and normalized_entropy).")
    min_improvement: float = Field(-0.001, description="Required improvement over the champion; negative tolerates noise.")
    max_calibration_error: NonNegativeFloat | None = Field(0.2, description="Largest |calibration - 1| accepted; null to switch off.")
    if_incomparable: Literal["refuse", "promote"] = Field(
        "refuse", description="What to do when the champion cannot be scored on this data (other features)."
    )


class EvaluationConfig(Section):
    """What is measured on the test split."""

    metrics: list[MetricName] = Field(
        ["auc", "log_loss", "normalized_entropy", "calibration"], min_length=1, description="Reported metrics."
    )
    slices: list[str] = Field([], description="Single-valued slots by whose values the metrics are broken down.")
    min_slice_rows: PositiveInt = Field(50, description="Slice values with fewer records are pooled as 'other'.")
    batch_size: PositiveInt = Field(4096, description="Records per evaluation batch.")
    gate: GateConfig = Field(GateConfig(), description="Promotion rule.")

    @model_validator(mode="after")
    def _applicable(self) -> Self:
        if "min_slice_rows" in self.changed() and not self.slices:
            raise ValueError(f"min_slice_rows: {self.min_slice_rows} has no effect without slices; remove it or name slots in slices")
        return self


class Threshold(Section):
    """A pair of limits; null switches one off."""

    warn: NonNegativeFloat | None = Field(None, description="Reported above it.")
    fail: NonNegativeFloat | None = Field(None, description="The stage fails above it.")

    @model_validator(mode="after")
    def _order(self) -> Self:
        if self.warn is not None and self.fail is not None and self.fail < self.warn:
            raise ValueError(f"fail: must not be below warn, got fail {self.fail:g} < warn {self.warn:g}")
        return self


class ValidationConfig(Section):
    """Thresholds of the validate stage."""

    min_train_rows: PositiveInt = Field(1, description="The stage fails below it.")
    missing_rate: Threshold = Field(Threshold(warn=0.5, fail=0.999), description="Share of missing values per feature in train.")
    missing_rate_change: Threshold = Field(
        Threshold(warn=0.05, fail=0.5), description="|change of the missing rate| against the previous run."
    )
    unseen_id_rate: Threshold = Field(Threshold(warn=0.3, fail=None), description="Share of test ids that train never saw, per slot.")
    js_divergence: Threshold = Field(
        Threshold(warn=0.1, fail=None), description="Jensen-Shannon divergence (bits, 0..1) against the previous run."
    )
    psi: Threshold = Field(Threshold(warn=0.2, fail=None), description="Population stability index against the previous run.")
    label_rate_change: Threshold = Field(
        Threshold(warn=0.05, fail=0.5), description="|change of the positive rate| against the previous run."
    )


class OutputConfig(Section):
    """Where results go."""

    root: str = Field(
        "satrap-runs",
        min_length=1,
        description="Directory of runs, reusable data and the model registry; relative to the current directory.",
    )


class Config(Section):
    """A run, whole."""

    name: Name = Field(description="Name of the model; versions in the registry carry it.")
    data: DataConfig
    schema_: SchemaConfig = Field(alias="schema")
    split: SplitConfig
    embedding: EmbeddingConfig = EmbeddingConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    validation: ValidationConfig = ValidationConfig()
    cluster: ClusterConfig = ClusterConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        problems = [*self._slot_problems(), *self._model_problems()]
        if self.split.by == "time" and self.schema_.time is None:
            problems.append("split.by: time needs schema.time; declare the time column or split by hash")
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _slot_problems(self) -> list[str]:
        slots = [f.name for f in self.schema_.categorical]
        problems = []
        for name in self.embedding.slots:
            if name not in slots:
                problems.append(f"embedding.slots.{name}: no such slot; slots are {slots}")
        problems += self._group_problems(slots)
        single = [f.name for f in self.schema_.categorical if not f.multi_valued]
        for name in self.evaluation.slices:
            if name not in single:
                problems.append(f"evaluation.slices: {name!r} is not a single-valued slot; choose from {single}")
        return problems

    def _group_problems(self, slots: list[str]) -> list[str]:
        problems = []
        seen: dict[str, str] = {}
        for group, members in self.embedding.groups.items():
            for name in members:
                if name not in slots:
                    problems.append(f"embedding.groups.{group}: no slot {name!r}; slots are {slots}")
                if name in seen:
                    problems.append(f"embedding.groups.{group}: slot {name!r} is in group {seen[name]!r} already")
                seen[name] = group
            settings = {self._slot_setting(name) for name in members if name in slots}
            if len(settings) > 1:
                problems.append(
                    f"embedding.groups.{group}: slots that share rows need the same dim, optimizer, initializer, min_count and row_dtype"
                )
            if group in slots and group not in members:
                problems.append(f"embedding.groups.{group}: is also the name of a slot outside the group; choose another group name")
        return problems

    def _slot_setting(self, name: str) -> str:
        slot = self.embedding.slots.get(name, SlotConfig())
        default = self.embedding
        parts = (
            slot.dim or default.dim,
            slot.optimizer or default.optimizer,
            slot.initializer or default.initializer,
            slot.min_count or default.min_count,
            slot.row_dtype or default.row_dtype,
        )
        return repr(parts)

    def _model_problems(self) -> list[str]:
        model, dense = self.model, self.schema_.dense
        dims = {self.embedding.slots.get(f.name, SlotConfig()).dim or self.embedding.dim for f in self.schema_.categorical}
        problems = []
        if model.name in ("dlrm", "deepfm") and len(dims) > 1:
            problems.append(f"model.name: {model.name} needs one embedding dim for all slots, got {sorted(dims)}; use dnn or equal dims")
        if model.name == "deepfm" and dims == {1}:
            problems.append("embedding.dim: deepfm needs at least 2 (one first-order weight and a factor), got 1")
        if model.name == "dlrm" and len(self.schema_.categorical) + bool(dense) < 2:
            problems.append("model.name: dlrm multiplies pairs of vectors and the schema yields only one; add a slot or use dnn")
        if model.bottom_hidden and model.name != "dlrm":
            problems.append(f"model.bottom_hidden: only dlrm has a bottom MLP, not {model.name}; remove it")
        if model.bottom_hidden and not dense:
            problems.append("model.bottom_hidden: the schema has no dense features; remove it")
        return problems

    def to_dict(self) -> dict[str, Any]:
        """The tree as plain YAML/JSON values, with every default written out."""
        return self.model_dump(mode="json", by_alias=True)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no blanks. Equal configurations give equal text."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        """Hex sha256 of the canonical JSON."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
