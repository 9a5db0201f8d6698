"""What ``evaluation.json`` holds: the numbers of a candidate, and of the champion on the same test split. Free of torch.

A metric without a value is null, with its reason beside it; names and formulas are those of ``training.metrics``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from training.config import MetricName
from training.errors import CheckpointError, SatrapError

FORMAT_VERSION = 1


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelScore(_Entry):
    """How one model did on the test split."""

    checkpoint: str
    """Path it was read from."""
    checkpoint_digest: str
    """``checkpoint_digest`` of that path: which model this was, wherever it lies now."""
    step: int
    """Training steps behind it."""
    metrics: dict[MetricName, float | None]
    """Null where undefined."""
    undefined: dict[MetricName, str] = {}
    """Reason per null metric."""
    average_precision: float | None = None
    expected_calibration_error: float | None = None
    """Mean |mean prediction - positive rate| over 20 equal-mass bins, weighted by records."""


class ChampionScore(_Entry):
    """The champion the candidate was compared with."""

    checkpoint: str
    checkpoint_digest: str
    score: ModelScore | None
    """None if it cannot be scored on this data."""
    incomparable: str | None = None
    """Why it cannot be scored."""


class SliceScore(_Entry):
    """Metrics of the records with one value of a slot."""

    slot: str
    value: str | None
    """Null for the pool of values with fewer than ``evaluation.min_slice_rows`` records; empty text for records without a value."""
    pooled_values: int
    """How many values the pool holds; 0 for a single value."""
    rows: int
    positives: int
    metrics: dict[MetricName, float | None]
    champion_metrics: dict[MetricName, float | None] | None = None
    """Of the champion, where it could be scored."""


class EvaluationRecord(_Entry):
    """The content of ``evaluation.json``."""

    format_version: Literal[1] = Field(1, description="Version of this schema.")
    name: str
    """``Config.name``."""
    config_digest: str
    """``Config.digest`` of the evaluating configuration."""
    feature_digest: str
    """``Manifest.feature_digest`` of the data."""
    data_fingerprint: str
    """``Manifest.fingerprint`` of the data."""
    split: Literal["test"] = "test"
    rows: int
    positives: int
    candidate: ModelScore
    champion: ChampionScore | None
    """None: evaluated without a champion."""
    slices: list[SliceScore]
    """By slot in the order of ``evaluation.slices``, most records first, the pool last."""

    @classmethod
    def load(cls, path: Path) -> EvaluationRecord:
        """Read ``evaluation.json``; raises ``SatrapError``."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise SatrapError(f"{path}: cannot be read ({error.strerror}); run `satrap evaluate` first") from None
        except ValidationError as error:
            raise SatrapError(
                f"{path}: damaged or of another version ({error.error_count()} problems); run `satrap evaluate` again"
            ) from None


def checkpoint_digest(checkpoint: Path) -> str:
    """Hex sha256 of a checkpoint's ``manifest.json``, which holds the digests of all its other files. Raises ``CheckpointError``."""
    try:
        return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint}: no readable manifest.json ({error.strerror}), so not a complete checkpoint; run `satrap train`"
        ) from None
