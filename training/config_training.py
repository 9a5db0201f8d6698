"""The sections that say what is trained and how: ``embedding``, ``model`` and ``training``."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.config_section import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section

MAX_DIM = 1024


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

    @model_validator(mode="after")
    def _applicable(self) -> Self:
        if self.kind == "zeros" and "scale" in self.changed():
            raise ValueError(f"scale: {self.scale:g} has no effect with kind zeros; remove it, or set kind: uniform or normal")
        return self


class SlotConfig(Section):
    """Overrides of the embedding defaults for one slot."""

    dim: Annotated[int, Field(gt=0, le=MAX_DIM)] | None = Field(None, description="Width of the slot's rows.")
    optimizer: SparseOptimizerConfig | None = Field(None, description="Optimizer of the slot's rows.")
    initializer: InitializerConfig | None = Field(None, description="First values of the slot's rows.")
    min_count: Annotated[int, Field(ge=1, le=255)] | None = Field(None, description="Admission threshold of the slot.")
    row_dtype: RowDtype | None = Field(None, description="Format of the slot's rows.")


class EmbeddingConfig(Section):
    """The embedding rows: width, optimizer, capacity."""

    dim: PositiveInt = Field(16, le=MAX_DIM, description="Width of a row unless its slot says otherwise.")
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

    data_loader: PositiveInt = Field(1, le=1024, description="Processes that read shards.")
    embedding_worker: PositiveInt = Field(1, le=1024, description="Processes that dedup, route and pool.")
    nn_worker: PositiveInt = Field(1, le=1024, description="Ranks of the dense network.")
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
        description="Earlier batches of a rank whose row updates may be unacknowledged at a look-up. Mode sync means 0 in any case.",
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
    transport: Literal["shared_memory", "unix", "tcp"] = Field(
        "shared_memory",
        description="Between local processes: Unix sockets with arrays in shared memory (through the socket where the system has none), "
        "Unix sockets for all, or TCP.",
    )
    tcp_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Transport tcp: address of this machine that roles listen on. Beyond loopback others can connect; "
        "they need the job's token, and nothing is encrypted.",
    )
    evaluate_every_steps: PositiveInt | None = Field(None, description="Steps between evaluations on valid; each epoch's end when absent.")
    early_stopping: EarlyStoppingConfig | None = Field(None, description="Stop on the valid split.")
    checkpoint_every_steps: PositiveInt | None = Field(None, description="Steps between checkpoints; only at the end when absent.")
    keep_checkpoints: PositiveInt = Field(2, description="Newest checkpoints kept.")
    log_every_steps: PositiveInt = Field(10, description="Steps between TensorBoard points.")
    profile_steps: Annotated[int, Field(ge=0, le=10_000)] = Field(
        0, description="First steps whose every phase is kept in all roles for `satrap profile`; 0 for none."
    )
    projector_rows: Annotated[int, Field(ge=0, le=10_000)] = Field(
        0, description="Rows sampled into TensorBoard's embedding projector at the end; 0 for none."
    )
    dense_threads: PositiveInt | None = Field(
        None,
        description="torch threads per nn_worker. When absent: the ranks share all cores in mode sync; in the others the first steps try "
        "some numbers and the fastest stays. The last bits of a result may depend on it.",
    )
    server_threads: Annotated[int, Field(ge=1, le=256)] | None = Field(
        None,
        description="Threads per parameter_server that share one large look-up or update; chosen like dense_threads when absent. "
        "Results do not depend on it.",
    )
    start_timeout_seconds: PositiveFloat = Field(120.0, description="How long a role may take to come up.")
    request_timeout_seconds: PositiveFloat = Field(120.0, description="How long a peer may take to answer.")

    @model_validator(mode="after")
    def _applicable(self) -> Self:
        # max_staleness stays legal in mode sync: there the mode alone is the switch.
        changed = self.changed()
        if "averaging_period" in changed and self.mode != "async":
            raise ValueError(f"averaging_period: {self.averaging_period} has no effect in mode {self.mode}; remove it or set mode: async")
        if "shuffle_window_shards" in changed and not self.shuffle:
            raise ValueError(
                f"shuffle_window_shards: {self.shuffle_window_shards} has no effect without shuffle; remove it or set shuffle: true"
            )
        return self

    @property
    def staleness_bound(self) -> int:
        """The bound in force: 0 in mode sync."""
        return 0 if self.mode == "sync" else self.max_staleness
