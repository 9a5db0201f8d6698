"""What a data directory holds. ``manifest.json`` is written last, so a directory without it is unfinished and refused.

Layout of a data directory::

    manifest.json
    train/ valid/ test/   part-*.arrow      shards, see training.data.shards
    ids/<slot>.npy                          sorted distinct signs of the train split, uint64
    dead/part-*.jsonl                       malformed records: file, line, reason, detail, record
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from training.config import SPLITS, SplitName
from training.errors import ManifestError

FORMAT_VERSION = 1


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SourceEntry(_Entry):
    """One input file as it was read."""

    path: str
    bytes: int
    digest: str
    """Hex xxh3-128 of the file's bytes."""


class ShardEntry(_Entry):
    """One shard file."""

    file: str
    """Relative to the data directory."""
    split: SplitName
    rows: int
    bytes: int
    digest: str
    """Hex xxh3-128 of the logical column contents, not of the file's framing."""
    first_time: int | None = None
    """Smallest event time, seconds since the epoch (UTC); None without a time column."""
    last_time: int | None = None


class DenseStatistics(_Entry):
    """One numeric feature in one split, before its transforms."""

    rows: int
    missing: int
    mean: float
    std: float
    """Population standard deviation of the values present."""
    min: float
    max: float
    edges: list[float]
    """Ascending bucket edges of ``counts``; the same for every run, so that runs compare."""
    counts: list[int]
    """Values present per bucket, ``len(edges) + 1`` of them: below the first edge, between edges, from the last edge on."""


class SlotStatistics(_Entry):
    """One slot in one split. In a single-valued slot a missing value is an id of its own, the empty text: it counts as an id too."""

    rows: int
    missing: int
    """Records without any id."""
    ids: int
    """Occurrences."""
    distinct: int
    unseen: int
    """Occurrences whose sign the train split lacks (0 for train)."""
    dropped: int
    """Occurrences beyond ``max_ids``."""
    top: list[tuple[str, int]]
    """Most frequent values with counts, by (-count, value), at most 20."""
    bucket_counts: list[int]
    """Occurrences per bucket of the sign's top six bits: 64 buckets."""


class SplitStatistics(_Entry):
    """One split."""

    rows: int
    positives: int
    dense: dict[str, DenseStatistics]
    slots: dict[str, SlotStatistics]


class DenseTransform(_Entry):
    """What was applied to one numeric feature; enough to repeat it when serving."""

    name: str
    fill: float
    transforms: list[str]
    mean: float
    """Mean after log1p if that came first: what standardise subtracted (0 if unused)."""
    std: float
    """What standardise divided by (1 if unused)."""


class SlotTransform(_Entry):
    """How one slot's signs were made."""

    name: str
    group: str
    hash_seed: int
    """Seed of xxh64 for the slot's group."""
    boundaries: list[float] | None = None
    """Bucket boundaries, for bucketised slots."""


class Manifest(_Entry):
    """The content of ``manifest.json``."""

    format_version: int
    name: str
    """``Config.name`` of the run that wrote it."""
    fingerprint: str
    """Hex sha256 over features, transforms and shard digests: equal content, equal fingerprint."""
    feature_digest: str
    """Hex sha256 over what a model needs equal to be scored on this data: features, order, hash seeds, multi-valuedness."""
    sources: list[SourceEntry]
    dense: list[DenseTransform]
    slots: list[SlotTransform]
    slice_columns: list[str]
    """Slots whose value texts the shards carry for slice metrics."""
    shards: list[ShardEntry]
    splits: dict[SplitName, SplitStatistics]
    dead: dict[str, int]
    """Malformed records by reason."""
    data_key: str = ""
    """What ``training.data.preprocess.data_key`` gave: configuration and sources this was made from."""
    cut_points: list[int] | None = None
    """By time: first second of valid and of test."""

    def rows(self, split: SplitName) -> int:
        """Records of a split."""
        return self.splits[split].rows if split in self.splits else 0

    @property
    def summary(self) -> str:
        """Records per split, malformed ones, and the start of the fingerprint, for people."""
        rows = ", ".join(f"{self.rows(split):,} {split}" for split in SPLITS)
        return f"{rows}, {sum(self.dead.values()):,} malformed (fingerprint {self.fingerprint[:12]})"

    @classmethod
    def load(cls, data_dir: Path) -> Manifest:
        """Read and check ``manifest.json``; raises ``ManifestError``."""
        path = data_dir / "manifest.json"
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise ManifestError(
                f"{data_dir}: no manifest.json, so not a finished data directory; run `satrap preprocess` into it"
            ) from None
        except NotADirectoryError:
            raise ManifestError(f"{data_dir}: not a directory") from None
        except ValidationError as error:
            raise ManifestError(
                f"{path}: damaged or of another version ({error.error_count()} problems); run `satrap preprocess` again"
            ) from None
        if manifest.format_version != FORMAT_VERSION:
            raise ManifestError(
                f"{path}: format version {manifest.format_version}, this satrap reads {FORMAT_VERSION}; run `satrap preprocess` again"
            )
        return manifest
