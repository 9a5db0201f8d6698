"""What ``report.json`` of the validate stage holds."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from training.config import SPLITS, Config, SplitName
from training.data.manifest import Manifest

FORMAT_VERSION = 1
Severity = Literal["warn", "fail"]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(_Entry):
    """One check that did not pass."""

    severity: Severity
    check: str
    """``schema``, ``shards``, ``previous_run``, ``constant``, ``one_class``, ``empty_split``, ``features_changed`` or a field of
    ``config.validation``; ``unseen_by_previous`` is judged by ``unseen_id_rate``, too."""
    feature: str | None
    """None: not about one feature."""
    value: float | None
    threshold: float | None
    """The limit that ``value`` broke; None for checks without one."""
    message: str
    """Feature, value and limit in words."""
    remedy: str
    """What to do about it."""


class FeatureReport(_Entry):
    """One feature's numbers; None where there is nothing to measure or to compare with."""

    name: str
    kind: Literal["dense", "categorical"]
    missing_rate: float | None
    """Share of train records without a value."""
    previous_missing_rate: float | None = None
    unseen_id_rate: float | None = None
    """Share of id occurrences in test that train never saw."""
    unseen_by_previous: float | None = None
    """Share of id occurrences in train that the previous run's train split never saw (from an even sample of records)."""
    js_divergence: float | None = None
    """Bits, 0 to 1, against the previous run."""
    psi: float | None = None
    """Against the previous run."""
    js_noise: float | None = None
    """What sampling alone would give."""
    psi_noise: float | None = None


class SplitReport(_Entry):
    """Size and label of one split."""

    rows: int
    positive_rate: float | None
    previous_rows: int | None = None
    previous_positive_rate: float | None = None


class ValidationReport(_Entry):
    """The content of ``report.json``."""

    format_version: int
    status: Literal["passed", "warned", "failed"]
    name: str
    fingerprint: str
    previous: str | None
    """Data directory compared with."""
    previous_fingerprint: str | None
    splits: dict[SplitName, SplitReport]
    dead: dict[str, int]
    """Malformed records by reason."""
    findings: list[Finding]
    """Failures first."""
    features: list[FeatureReport]
    """Dense, then categorical, in schema order."""

    @classmethod
    def of(
        cls,
        config: Config,
        manifest: Manifest,
        before: Manifest | None,
        *,
        previous: Path | None,
        findings: list[Finding],
        features: list[FeatureReport],
    ) -> ValidationReport:
        """Put the parts together."""
        severities = {finding.severity for finding in findings}
        return cls(
            format_version=FORMAT_VERSION,
            status="failed" if "fail" in severities else "warned" if severities else "passed",
            name=config.name,
            fingerprint=manifest.fingerprint,
            previous=None if previous is None else str(previous),
            previous_fingerprint=None if before is None else before.fingerprint,
            splits={split: _split(manifest, before, split) for split in SPLITS},
            dead=manifest.dead,
            findings=findings,
            features=features,
        )


def positive_rate(manifest: Manifest, split: SplitName) -> float | None:
    """Share of positive labels; None for an empty split."""
    rows = manifest.rows(split)
    return manifest.splits[split].positives / rows if rows else None


def _split(manifest: Manifest, before: Manifest | None, split: SplitName) -> SplitReport:
    return SplitReport(
        rows=manifest.rows(split),
        positive_rate=positive_rate(manifest, split),
        previous_rows=None if before is None else before.rows(split),
        previous_positive_rate=None if before is None else positive_rate(before, split),
    )
