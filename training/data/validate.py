"""The ``validate`` stage: is this the data the configuration declares, and does it look like the previous run's?

Three groups of checks, each giving findings:

1. *Schema*: features, their order, groups, transforms and slices of the manifest are those of the configuration; shards are present and
   add up. A mismatch always fails: the data was made from another configuration.
2. *Content*: rows, one class only, constant features, missing values, ids of the test split that train never saw.
3. *Against the previous run*: features new, gone or changed; change of the missing rate and of the positive rate; ids the previous run
   never trained on; Jensen-Shannon divergence and population stability index (formulas in ``training.data.drift``).

Thresholds are those of ``config.validation``: a value above ``warn`` is reported, one above ``fail`` ends the stage, after the reports
are written. Rates and distributions are of the train split unless said otherwise.
"""

from __future__ import annotations

from pathlib import Path

from training.config import Config
from training.data.manifest import Manifest
from training.data.validation_checks import Findings, check_content, check_drift, check_schema
from training.data.validation_html import render
from training.data.validation_report import ValidationReport
from training.errors import ManifestError, ValidationError
from training.report import write_text


def validate(config: Config, data_dir: Path, report_dir: Path, *, previous: Path | None) -> ValidationReport:
    """Check a data directory; write ``report.json`` and ``report.html`` into ``report_dir``.

    ``previous``: the data directory of the previous run, or None. One that cannot be read is a warning, for it is not this run's fault.
    Raises ``ManifestError`` if ``data_dir`` is not a finished data directory, and ``ValidationError`` if a check failed (the reports
    exist then, too).
    """
    manifest = Manifest.load(data_dir)
    findings = Findings()
    check_schema(config, manifest, data_dir, findings)
    before = _previous_manifest(previous, findings)
    features = check_content(config, manifest, findings)
    if before is not None and previous is not None:
        features = check_drift(config, (manifest, data_dir), (before, previous), features, findings)
    report = ValidationReport.of(config, manifest, before, previous=previous, findings=findings.ordered(), features=features)
    write_text(report_dir / "report.json", report.model_dump_json(indent=2) + "\n")
    write_text(report_dir / "report.html", render(report, config, manifest, before))
    if failures := [finding for finding in report.findings if finding.severity == "fail"]:
        lines = "\n".join(f"  {finding.message}; {finding.remedy}" for finding in failures)
        count = "1 check" if len(failures) == 1 else f"{len(failures)} checks"
        raise ValidationError(f"{data_dir}: {count} failed (report: {report_dir / 'report.html'})\n{lines}")
    return report


def _previous_manifest(previous: Path | None, findings: Findings) -> Manifest | None:
    if previous is None:
        return None
    try:
        return Manifest.load(previous)
    except ManifestError as error:
        findings.add(
            "warn",
            "previous_run",
            None,
            f"the previous run's data cannot be compared: {error}",
            "drift was not checked; nothing else to do",
        )
        return None
