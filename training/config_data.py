"""The sections that say what the data are: ``data``, ``schema`` and ``split``."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from training.config_section import Fraction, Name, PositiveInt, Section

TIME_FORMATS = ("epoch_seconds", "epoch_milliseconds", "iso8601")
_FLOAT32_LIMIT = (2.0 - 2.0**-24) * 2.0**127  # rounds to infinity
# What the readers of a format do not look at: jsonl has no fields to quote, parquet is neither text nor cut by bytes.
_IGNORED = {"jsonl": {"header", "quoting"}, "parquet": {"header", "quoting", "encoding", "chunk_bytes"}}


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
        for key in sorted(self.changed() & _IGNORED.get(self.format, set())):
            formats = [name for name in ("csv", "tsv", "jsonl") if key not in _IGNORED.get(name, set())]
            raise ValueError(f"{key}: {getattr(self, key)!r} has no effect on {self.format} files, only on {', '.join(formats)}; remove it")
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

    @model_validator(mode="after")
    def _known(self) -> Self:
        if "%" not in self.format and self.format not in TIME_FORMATS:
            raise ValueError(
                f"format: {self.format!r} is not one of {', '.join(TIME_FORMATS)}, nor a strptime pattern such as %Y-%m-%d %H:%M:%S"
            )
        return self


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

    @model_validator(mode="after")
    def _usable(self) -> Self:
        if len(set(self.transforms)) != len(self.transforms):
            raise ValueError(f"transforms: {self.transforms} repeats a transform; give each once")
        if self.fill != "mean" and not abs(self.fill) < _FLOAT32_LIMIT:
            raise ValueError(f"fill: {self.fill!r} is not finite as float32; give a number within 3.4e38 or mean")
        return self

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
        if self.separator is None and "max_ids" in self.changed():
            raise ValueError(f"max_ids: {self.max_ids} only means something for a multi-valued slot; add separator or remove max_ids")
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

    @model_validator(mode="before")
    @classmethod
    def _default_fractions(cls, given: Any) -> Any:
        """So that the resolved configuration shows the shares in force."""
        if isinstance(given, dict) and given.get("by") in ("time", "hash") and given.get("fractions") is None:
            return {**given, "fractions": {}}
        return given

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
        if "salt" in self.changed() and (self.by == "time" or (self.by == "column" and not self.valid_fraction)):
            raise ValueError(f"salt: {self.salt!r} has no effect when by is {self.by}; use by: hash, or by: column with valid_fraction")
        return self
