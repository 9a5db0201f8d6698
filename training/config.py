"""The one description of a run: a frozen, typed tree read from a YAML file.

``training.config_file.load_config`` is the only way in. Unknown keys, wrong types and impossible combinations are refused with their path,
the value and the legal choices before anything starts. The resolved tree is stored with the run and in the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveInt = Annotated[int, Field(gt=0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, no silent coercion of text to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def changed(self) -> set[str]:
        """Fields whose value is not their default. A resolved configuration names every field, so being named means nothing."""
        return {
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default(call_default_factory=True)
        }


class DataConfig(Section):
    """Where the raw events lie and how to read them."""

    paths: list[str] = Field(
        min_length=1, description="Files or glob patterns, relative to the configuration file; gz is recognised by its suffix."
    )
    format: Literal["csv", "tsv", "jsonl", "parquet"] = Field(description="File format of every path.")
    delimiter: str | None = Field(
        None, min_length=1, max_length=4, description="Field separator (csv only); ',' when absent. Tsv always uses a tab."
    )
    header: bool = Field(True, description="Whether the first line of every csv/tsv file names the columns.")
    columns: list[str] = Field([], description="Column names in file order; required when header is false.")
    quoting: bool = Field(
        True, description="Whether double quotes may enclose fields (csv/tsv); quoted text may hold delimiters and newlines."
    )
    missing_values: list[str] = Field(
        ["", "?", "NA", "NaN", "nan", "null", "NULL", "None", "\\N"], description="Field texts that mean 'no value'."
    )
    strip_whitespace: bool = Field(True, description="Remove blanks around every field before anything else looks at it.")
    encoding: Literal["utf-8", "latin-1"] = Field("utf-8", description="Text encoding; undecodable records are dead letters.")
    max_dead_fraction: Fraction = Field(0.01, description="Share of malformed records above which preprocessing fails.")
    chunk_bytes: int = Field(16 * 1024 * 1024, ge=1024, description="Bytes of input one Beam element covers.")

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.delimiter is not None and self.format != "csv":
            raise ValueError(f"delimiter: only meaningful with format csv, not {self.format}; remove it or set format: csv")
        if self.format in ("csv", "tsv") and not self.header and not self.columns:
            raise ValueError("columns: required when header is false; list the column names in file order")
        if self.format in ("jsonl", "parquet") and self.columns:
            raise ValueError(f"columns: {self.format} files name their own columns; remove it")
        if len(set(self.columns)) != len(self.columns):
            raise ValueError(f"columns: names must differ, got {sorted({c for c in self.columns if self.columns.count(c) > 1})} twice")
        return self


class LabelConfig(Section):
    """Which column is the binary target, and how its text becomes 0 or 1."""

    column: str = Field(min_length=1, description="Source column.")
    positive: list[str] = Field([], description="Texts that mean 1, every other text means 0. Empty: the column holds the numbers 0 and 1.")
    threshold: float | None = Field(None, description="Numbers at or above it mean 1. Excludes 'positive'.")

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if self.positive and self.threshold is not None:
            raise ValueError("threshold: give either positive or threshold, not both")
        return self


class TimeConfig(Section):
    """The event time; with it, shards are written in time order."""

    column: str = Field(min_length=1, description="Source column.")
    format: str = Field(
        "epoch_seconds", description="epoch_seconds, epoch_milliseconds, iso8601, or a strptime pattern such as %y%m%d%H (UTC)."
    )


class DenseFeature(Section):
    """A numeric input of the dense network."""

    name: Name = Field(description="Feature name.")
    column: str | None = Field(None, description="Source column; the feature name when absent.")
    transforms: list[Literal["log1p", "standardise"]] = Field(
        [], description="Applied in order; log1p maps x to sign(x)*log(1+|x|); standardise uses the train split's mean and deviation."
    )
    fill: float | Literal["mean"] = Field(
        "mean", description="What a missing value becomes before the transforms; mean is of the train split."
    )

    @property
    def source(self) -> str:
        """Column of the source the value is read from."""
        return self.column or self.name


class BucketiseConfig(Section):
    """Turns a number into a categorical value: the index of its bucket."""

    boundaries: list[float] = Field([], description="Ascending inner boundaries; n boundaries make n+1 buckets.")
    quantiles: int | None = Field(None, ge=2, le=1000, description="Number of equally filled buckets, from the train split.")

    @model_validator(mode="after")
    def _one_rule(self) -> Self:
        if bool(self.boundaries) == (self.quantiles is not None):
            raise ValueError("boundaries: give exactly one of boundaries and quantiles")
        if any(b <= a for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise ValueError(f"boundaries: must ascend, got {self.boundaries}")
        return self


class CategoricalFeature(Section):
    """A slot: one or several ids per record, looked up in an embedding table."""

    name: Name = Field(description="Slot name.")
    column: str | None = Field(None, description="Source column; the slot name when absent.")
    separator: str | None = Field(
        None,
        min_length=1,
        max_length=4,
        description="Makes the slot multi-valued: text between its ids. List columns (jsonl, parquet) need any value here.",
    )
    max_ids: PositiveInt = Field(100, description="Multi-valued slots keep this many ids per record; the rest is dropped and counted.")
    pooling: Literal["sum", "mean"] = Field(
        "sum", description="How the rows of a multi-valued slot become one vector; an empty list gives zeros."
    )
    bucketise: BucketiseConfig | None = Field(None, description="Read the column as a number and use its bucket as the id.")

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.separator is not None and self.bucketise is not None:
            raise ValueError("bucketise: not possible for a multi-valued slot; remove separator or bucketise")
        if self.separator is None and "pooling" in self.changed():
            raise ValueError("pooling: only meaningful for a multi-valued slot; add separator or remove pooling")
        return self

    @property
    def source(self) -> str:
        """Column of the source the ids are read from."""
        return self.column or self.name

    @property
    def multi_valued(self) -> bool:
        """Whether a record may hold several ids."""
        return self.separator is not None


class SchemaConfig(Section):
    """What the columns mean."""

    label: LabelConfig = Field(description="The binary target.")
    time: TimeConfig | None = Field(None, description="The event time, if there is one.")
    dense: list[DenseFeature] = Field([], description="Numeric inputs, in order.")
    categorical: list[CategoricalFeature] = Field(min_length=1, description="Slots, in order.")

    @model_validator(mode="after")
    def _unique_names(self) -> Self:
        names = [*(f.name for f in self.dense), *(f.name for f in self.categorical)]
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise ValueError(f"feature names must differ, got {twice} twice; use name: and column: to read one column into two features")
        return self


class Fractions(Section):
    """Shares of the records per split; they add up to 1."""

    train: Fraction = Field(0.8, description="Share of the train split.")
    valid: Fraction = Field(0.1, description="Share of the valid split.")
    test: Fraction = Field(0.1, description="Share of the test split.")

    @model_validator(mode="after")
    def _sum(self) -> Self:
        total = self.train + self.valid + self.test
        if abs(total - 1.0) > 1e-6:
            raise ValueError(f"train + valid + test must be 1, got {total:g}")
        if self.train == 0.0:
            raise ValueError("train: must be above 0")
        return self


class SplitConfig(Section):
    """How records are divided into train, valid and test."""

    by: Literal["time", "column", "hash"] = Field(
        description="By event time, by the value of a column, or by a stable hash of key columns."
    )
    fractions: Fractions | None = Field(None, description="Shares (by time or hash); 0.8/0.1/0.1 when absent.")
    column: str | None = Field(None, description="Column that names the split (by column).")
    train: list[str] = Field(["train"], description="Values of the column that mean train.")
    valid: list[str] = Field(["valid"], description="Values of the column that mean valid.")
    test: list[str] = Field(["test"], description="Values of the column that mean test.")
    valid_fraction: Fraction = Field(
        0.0, description="By column: share of the train records moved to valid by a stable hash of the record."
    )
    key: list[str] = Field([], description="By hash: columns whose values decide; the whole record when empty.")
    salt: str = Field("satrap", description="Changes which records fall where under the hash.")

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        if self.by == "column" and self.column is None:
            raise ValueError("column: required when by is column")
        if self.by != "column":
            for key in ("column", "train", "valid", "test", "valid_fraction"):
                if key in self.changed():
                    raise ValueError(f"{key}: only meaningful when by is column, not {self.by}")
        elif self.fractions is not None:
            raise ValueError("fractions: not possible when by is column; use valid_fraction")
        if self.by != "hash" and self.key:
            raise ValueError(f"key: only meaningful when by is hash, not {self.by}")
        return self


RowDtype = Literal["float32", "float16", "bfloat16"]


class ScheduleConfig(Section):
    """How the learning rate of rows changes from step to step: a linear warm-up to the optimizer's learning_rate, then this course."""

    course: Literal["constant", "inverse_sqrt", "cosine"] = Field(
        "constant", description="constant; inverse_sqrt: falls with the root of the step; cosine: half a wave down to final_fraction."
    )
    warmup_steps: Annotated[int, Field(ge=0)] = Field(0, description="Steps from 0 up to the learning rate.")
    decay_steps: PositiveInt | None = Field(None, description="cosine: steps from the end of the warm-up to the lowest rate.")
    final_fraction: Fraction = Field(0.0, description="cosine: lowest rate as a share of the learning rate.")

    @model_validator(mode="after")
    def _applicable(self) -> Self:
        if self.course == "cosine" and self.decay_steps is None:
            raise ValueError("decay_steps: required when course is cosine")
        if self.course != "cosine" and (extra := sorted(self.changed() & {"decay_steps", "final_fraction"})):
            raise ValueError(f"{extra[0]}: only meaningful when course is cosine, not {self.course}")
        return self


class SparseOptimizerConfig(Section):
    """The optimizer of embedding rows. Formulas are those of torch.optim; state lives beside each row."""

    name: Literal["sgd", "adagrad", "rowwise_adagrad", "adam"] = Field(
        "adagrad", description="Update rule; rowwise_adagrad keeps one accumulator per row, the mean of g^2."
    )
    learning_rate: PositiveFloat = Field(0.02, description="Step size.")
    weight_decay: NonNegativeFloat = Field(0.0, description="L2 term added to the gradient of the rows a batch touches.")
    eps: PositiveFloat = Field(1e-8, description="Added to the denominator (adagrad, rowwise_adagrad, adam).")
    initial_accumulator: NonNegativeFloat = Field(0.0, description="Start value of the accumulator (adagrad, rowwise_adagrad).")
    beta1: Fraction = Field(0.9, description="Decay of the first moment (adam).")
    beta2: Fraction = Field(0.999, description="Decay of the second moment (adam).")
    momentum: Fraction = Field(0.0, description="Momentum (sgd).")
    clip_norm: PositiveFloat | None = Field(
        None, description="Largest norm of a row's gradient; a longer one is shortened to it before weight decay. No limit when absent."
    )
    schedule: ScheduleConfig = Field(ScheduleConfig(), description="Course of the learning rate over the steps of training.")

    @model_validator(mode="after")
    def _applicable(self) -> Self:
        allowed = {
            "sgd": {"momentum"},
            "adagrad": {"eps", "initial_accumulator"},
            "rowwise_adagrad": {"eps", "initial_accumulator"},
            "adam": {"eps", "beta1", "beta2"},
        }[self.name] | {"name", "learning_rate", "weight_decay", "clip_norm", "schedule"}
        if extra := sorted(self.changed() - allowed):
            raise ValueError(f"{extra[0]}: {self.name} has no such setting; it takes {sorted(allowed - {'name'})}")
        if self.name == "adam" and max(self.beta1, self.beta2) >= 1.0:
            raise ValueError("beta1, beta2: must be below 1")
        return self


class InitializerConfig(Section):
    """First values of a row: a function of its sign and the seed only, so order and server count cannot change them."""

    kind: Literal["uniform", "normal", "zeros"] = Field(
        "uniform", description="uniform in [-scale, scale], normal with deviation scale, or zeros."
    )
    scale: PositiveFloat = Field(0.01, description="Half-width or standard deviation.")


class SlotConfig(Section):
    """Overrides of the embedding defaults for one slot."""

    dim: PositiveInt | None = Field(None, description="Width of the slot's rows.")
    optimizer: SparseOptimizerConfig | None = Field(None, description="Optimizer of the slot's rows.")
    initializer: InitializerConfig | None = Field(None, description="First values of the slot's rows.")
    min_count: Annotated[int, Field(ge=1, le=255)] | None = Field(None, description="Admission threshold of the slot.")
    row_dtype: RowDtype | None = Field(None, description="Format of the slot's rows.")


class EmbeddingConfig(Section):
    """The embedding rows: width, optimizer, capacity."""

    dim: PositiveInt = Field(16, le=1024, description="Width of a row unless its slot says otherwise.")
    capacity_rows: int = Field(
        1_000_000, ge=64, description="Rows kept per table over all parameter servers; beyond it the least recently used go."
    )
    optimizer: SparseOptimizerConfig = Field(SparseOptimizerConfig(), description="Default optimizer of rows.")
    initializer: InitializerConfig = Field(InitializerConfig(), description="Default first values.")
    min_count: Annotated[int, Field(ge=1, le=255)] = Field(
        1, description="Times a sign must be seen in training before it gets a row (admission); 1 admits at once."
    )
    row_dtype: RowDtype = Field(
        "float32",
        description="Format of stored values; float16 and bfloat16 halve them and round stochastically, optimizer state stays float32.",
    )
    groups: dict[str, list[str]] = Field(
        {}, description="Slots that share rows: group name -> slot names. A slot outside is its own group."
    )
    slots: dict[str, SlotConfig] = Field({}, description="Overrides per slot name.")


class ModelConfig(Section):
    """The dense network."""

    name: Literal["dnn", "dlrm", "deepfm"] = Field(
        "dnn", description="dnn: MLP over dense inputs and embeddings; dlrm: dot interactions; deepfm: factorisation machine + MLP."
    )
    hidden: list[PositiveInt] = Field([256, 128], min_length=1, description="Widths of the (top) MLP.")
    bottom_hidden: list[PositiveInt] = Field(
        [], description="dlrm: widths of the MLP over dense inputs; its output has the embedding's width."
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(0.0, description="Dropout after each hidden layer while training.")


class DenseOptimizerConfig(Section):
    """The optimizer of the dense network (torch.optim)."""

    name: Literal["sgd", "adagrad", "adam"] = Field("adam", description="torch.optim class.")
    learning_rate: PositiveFloat = Field(0.001, description="Step size.")
    weight_decay: NonNegativeFloat = Field(0.0, description="L2 term.")


class RolesConfig(Section):
    """How many processes of each role."""

    data_loader: PositiveInt = Field(1, le=64, description="Processes that read shards.")
    embedding_worker: PositiveInt = Field(1, le=64, description="Processes that dedup, route and pool.")
    nn_worker: PositiveInt = Field(1, le=64, description="Ranks of the dense network.")
    parameter_server: PositiveInt = Field(2, le=1024, description="Processes that hold rows.")


class EarlyStoppingConfig(Section):
    """Stop when the valid split no longer improves."""

    metric: Literal["auc", "log_loss"] = Field("auc", description="Watched metric.")
    patience: PositiveInt = Field(3, description="Evaluations without improvement before stopping.")
    min_delta: NonNegativeFloat = Field(0.0, description="Smallest change that counts as improvement.")


class TrainingConfig(Section):
    """How the model is trained."""

    mode: Literal["sync", "hybrid", "async"] = Field(
        "hybrid", description="sync: staleness 0; hybrid: rows asynchronous, dense synchronous; async: dense averaged now and then."
    )
    batch_size: PositiveInt = Field(512, description="Records per nn_worker rank and step.")
    max_staleness: Annotated[int, Field(ge=0, le=1024)] = Field(
        4,
        description="Earlier batches of a rank whose row updates may be unacknowledged at a look-up. Mode sync means 0 whatever stands here.",
    )
    averaging_period: PositiveInt = Field(16, description="Mode async: steps between averagings of the dense network.")
    epochs: PositiveInt = Field(1, description="Passes over the train split.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many steps.")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="Seeds the dense network, row initialisation and shuffling.")
    shuffle: bool = Field(False, description="Shuffle records within a window of shards each epoch; false keeps file or time order.")
    shuffle_window_shards: PositiveInt = Field(4, description="Shards per shuffle window.")
    dense_optimizer: DenseOptimizerConfig = Field(DenseOptimizerConfig(), description="Optimizer of the dense network.")
    roles: RolesConfig = Field(RolesConfig(), description="Process counts.")
    wire_dtype: Literal["float16", "float32"] = Field(
        "float16", description="Values and gradients between processes; float16 is scaled per block so that gradients do not underflow."
    )
    transport: Literal["unix", "tcp"] = Field("unix", description="Sockets between local processes.")
    evaluate_every_steps: PositiveInt | None = Field(None, description="Steps between evaluations on valid; each epoch's end when absent.")
    early_stopping: EarlyStoppingConfig | None = Field(None, description="Stop on the valid split.")
    checkpoint_every_steps: PositiveInt | None = Field(None, description="Steps between checkpoints; only at the end when absent.")
    keep_checkpoints: PositiveInt = Field(2, description="Newest checkpoints kept.")
    log_every_steps: PositiveInt = Field(10, description="Steps between TensorBoard points.")
    projector_rows: Annotated[int, Field(ge=0, le=10_000)] = Field(
        0, description="Rows sampled into TensorBoard's embedding projector at the end; 0 for none."
    )
    dense_threads: PositiveInt | None = Field(
        None, description="torch threads per nn_worker; cores minus one, shared by the ranks, when absent."
    )
    server_threads: Annotated[int, Field(ge=1, le=256)] = Field(
        1, description="Threads per parameter_server that share one large look-up or update. Results do not depend on it."
    )
    start_timeout_seconds: PositiveFloat = Field(120.0, description="How long a role may take to come up.")
    request_timeout_seconds: PositiveFloat = Field(120.0, description="How long a peer may take to answer.")

    @property
    def staleness_bound(self) -> int:
        """The bound in force: 0 in mode sync."""
        return 0 if self.mode == "sync" else self.max_staleness


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
