"""The checks of the validate stage; see ``training.data.validate`` for what they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from training.config import SPLITS, Config, DenseFeature, Threshold
from training.data.drift import Drift, drift
from training.data.manifest import DenseStatistics, DenseTransform, Manifest, SlotStatistics, SlotTransform
from training.data.shards import ShardReader
from training.data.validation_report import FeatureReport, Finding, Severity, positive_rate
from training.embedding.slots import slots

# Records looked at for the share of ids new against the previous run: 64 blocks, evenly spread. A share of 0.3 is then known to
# about 0.001 if records were independent; reading everything would cost a pass over the data.
SAMPLE_BLOCKS = 64
BLOCK_ROWS = 4096

Side = tuple[Manifest, Path]
"""A data directory with its manifest."""
Statistics = DenseStatistics | SlotStatistics


class Findings:
    """Collects findings in the order of the checks."""

    def __init__(self) -> None:
        self._found: list[Finding] = []

    def add(self, severity: Severity, check: str, feature: str | None, message: str, remedy: str) -> None:
        """A finding without a limit."""
        self._found.append(
            Finding(severity=severity, check=check, feature=feature, value=None, threshold=None, message=message, remedy=remedy)
        )

    def judge(self, check: str, feature: str | None, value: float | None, limits: Threshold, *, what: str, remedy: str) -> None:
        """A finding if ``value`` is above a limit; the worse one counts. ``what`` names the quantity in words."""
        if value is None:
            return
        for severity, limit in (("fail", limits.fail), ("warn", limits.warn)):
            if limit is not None and value > limit:
                key = "unseen_id_rate" if check == "unseen_by_previous" else check
                message = f"{what} is {value:.4g}, above validation.{key}.{severity} {limit:g}"
                self._found.append(
                    Finding(
                        severity="fail" if severity == "fail" else "warn",
                        check=check,
                        feature=feature,
                        value=value,
                        threshold=limit,
                        message=message,
                        remedy=remedy,
                    )
                )
                return

    def ordered(self) -> list[Finding]:
        """Failures first, each group in the order found."""
        return sorted(self._found, key=lambda finding: finding.severity != "fail")


def check_schema(config: Config, manifest: Manifest, data_dir: Path, findings: Findings) -> None:
    """The manifest describes what the configuration declares, and its shards are there."""
    again = "run `satrap preprocess` again with this configuration"
    for feature, message in _schema_differences(config, manifest):
        findings.add("fail", "schema", feature, message, again)
    for split in SPLITS:
        counted = sum(shard.rows for shard in manifest.shards if shard.split == split)
        if counted != manifest.rows(split):
            findings.add(
                "fail", "shards", None, f"shards of {split} hold {counted} records, statistics count {manifest.rows(split)}", again
            )
    for shard in manifest.shards:
        path = data_dir / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            findings.add("fail", "shards", None, f"{path} {found}, the manifest says {shard.bytes} bytes", again)


def _schema_differences(config: Config, manifest: Manifest) -> Iterator[tuple[str | None, str]]:
    schema = config.schema_
    yield from _order_differences("dense features", [f.name for f in schema.dense], [d.name for d in manifest.dense])
    yield from _order_differences("slots", [f.name for f in schema.categorical], [s.name for s in manifest.slots])
    dense = {entry.name: entry for entry in manifest.dense}
    for feature in schema.dense:
        if feature.name in dense:
            yield from _dense_differences(feature, dense[feature.name])
    made = {entry.name: entry for entry in manifest.slots}
    bucketise = {feature.name: feature.bucketise for feature in schema.categorical}
    for slot in slots(config):
        if slot.name in made:
            yield from _slot_differences(slot.name, slot.group, made[slot.name], bucketise[slot.name] is not None)
            rule = bucketise[slot.name]
            if rule is not None and rule.boundaries and made[slot.name].boundaries not in (None, rule.boundaries):
                yield slot.name, f"slot {slot.name}: bucket boundaries are {made[slot.name].boundaries}, declared {rule.boundaries}"
    if sorted(manifest.slice_columns) != sorted(config.evaluation.slices):
        yield None, f"shards carry slice values of {manifest.slice_columns}, evaluation.slices declares {config.evaluation.slices}"


def _order_differences(what: str, declared: list[str], found: list[str]) -> Iterator[tuple[str | None, str]]:
    for name in declared:
        if name not in found:
            yield name, f"{what}: {name} is declared but not in the data"
    for name in found:
        if name not in declared:
            yield name, f"{what}: {name} is in the data but not declared"
    if sorted(declared) == sorted(found) and declared != found:
        yield None, f"{what}: the data has the order {found}, declared is {declared}"


def _dense_differences(declared: DenseFeature, made: DenseTransform) -> Iterator[tuple[str, str]]:
    name = declared.name
    if made.transforms != list(declared.transforms):
        yield name, f"feature {name}: the data was made with transforms {made.transforms}, declared {list(declared.transforms)}"
    if declared.fill != "mean" and made.fill != declared.fill:
        yield name, f"feature {name}: missing values were filled with {made.fill:g}, declared {declared.fill:g}"


def _slot_differences(name: str, group: str, made: SlotTransform, bucketised: bool) -> Iterator[tuple[str, str]]:
    if made.group != group:
        yield name, f"slot {name}: the data was made for group {made.group}, declared {group}"
    elif made.hash_seed != (seed := xxhash.xxh64_intdigest(group.encode(), 0)):
        yield name, f"slot {name}: signs were made with hash seed {made.hash_seed}, group {group} has {seed}"
    if bucketised != (made.boundaries is not None):
        yield name, f"slot {name}: the data is {'' if made.boundaries is not None else 'not '}bucketised, declared the other way"


def check_content(config: Config, manifest: Manifest, findings: Findings) -> list[FeatureReport]:
    """Rows, labels and features of this run alone. Returns one entry per feature that is both declared and present."""
    limits = config.validation
    rows = manifest.rows("train")
    if rows < limits.min_train_rows:
        message = f"train has {rows} records, below validation.min_train_rows {limits.min_train_rows}"
        findings.add("fail", "min_train_rows", None, message, "give more data.paths, or lower the limit")
    _check_labels(manifest, findings)
    features = []
    for name, kind, statistics in _statistics(config, manifest):
        missing = statistics.missing / statistics.rows if statistics.rows else None
        remedy = f"look at column {_source(config, name)!r} and data.missing_values, or raise the limit"
        findings.judge("missing_rate", name, missing, limits.missing_rate, what=f"{name}: missing rate", remedy=remedy)
        if statistics.rows and _constant(statistics):
            findings.add(
                "warn", "constant", name, f"{name}: has one value only in train", "it teaches the model nothing; remove it from the schema"
            )
        unseen = _unseen_in_test(manifest, name)
        remedy = (
            "expect default rows for these ids; shorten the time between train and test, bucketise or drop the slot, or raise the limit"
        )
        findings.judge(
            "unseen_id_rate", name, unseen, limits.unseen_id_rate, what=f"{name}: share of test ids that train never saw", remedy=remedy
        )
        features.append(FeatureReport(name=name, kind=kind, missing_rate=missing, unseen_id_rate=unseen))
    return features


def _check_labels(manifest: Manifest, findings: Findings) -> None:
    for split in SPLITS:
        rate = positive_rate(manifest, split)
        if rate is None and split != "train":
            text = "so there is nothing to evaluate on" if split == "test" else "so there is no early stopping or validation curve"
            findings.add("warn", "empty_split", None, f"{split} has no records, {text}", "change the split section if you need them")
        elif rate in (0.0, 1.0):
            severity: Severity = "fail" if split == "train" else "warn"
            remedy = (
                "check schema.label: column, positive and threshold" if split == "train" else "auc will be undefined; enlarge the split"
            )
            findings.add(severity, "one_class", None, f"all {manifest.rows(split)} labels of {split} are {int(rate)}", remedy)


def check_drift(config: Config, current: Side, previous: Side, features: list[FeatureReport], findings: Findings) -> list[FeatureReport]:
    """This run against the previous one. Returns ``features`` with the comparisons filled in."""
    (manifest, _), (before, _) = current, previous
    limits = config.validation
    comparable = _comparable(manifest, before, findings)
    unseen = _unseen_by_previous(config, current, previous)
    result = []
    for feature in features:
        ours, theirs = _of(manifest, feature.name), _of(before, feature.name)
        if feature.name not in comparable or ours is None or theirs is None:
            result.append(feature)
            continue
        old_missing = theirs.missing / theirs.rows if theirs.rows else None
        distance = _distance(feature.name, ours, theirs, findings)
        result.append(
            feature.model_copy(
                update={
                    "previous_missing_rate": old_missing,
                    "unseen_by_previous": unseen.get(feature.name),
                    **({} if distance is None else vars(distance)),
                }
            )
        )
    for feature in result:
        _judge_drift(feature, config, findings)
    now, then = positive_rate(manifest, "train"), positive_rate(before, "train")
    if now is not None and then is not None:
        what = f"change of the positive rate of train (from {then:.4g} to {now:.4g})"
        remedy = "check the label's source and the sampling of negatives, or raise the limit"
        findings.judge("label_rate_change", None, abs(now - then), limits.label_rate_change, what=what, remedy=remedy)
    return result


def _judge_drift(feature: FeatureReport, config: Config, findings: Findings) -> None:
    limits, name = config.validation, feature.name
    look = f"look at column {_source(config, name)!r} at its source, or raise the limit"
    if feature.missing_rate is not None and feature.previous_missing_rate is not None:
        change = abs(feature.missing_rate - feature.previous_missing_rate)
        what = f"{name}: change of the missing rate (from {feature.previous_missing_rate:.4g} to {feature.missing_rate:.4g})"
        findings.judge("missing_rate_change", name, change, limits.missing_rate_change, what=what, remedy=look)
    what = f"{name}: share of ids that the previous run never saw"
    remedy = "a warm start gives these ids fresh rows; check the id's format if that is unexpected, or raise the limit"
    findings.judge("unseen_by_previous", name, feature.unseen_by_previous, limits.unseen_id_rate, what=what, remedy=remedy)
    for check, value, noise, limit, words in (
        ("js_divergence", feature.js_divergence, feature.js_noise, limits.js_divergence, "Jensen-Shannon divergence in bits"),
        ("psi", feature.psi, feature.psi_noise, limits.psi, "population stability index"),
    ):
        doubt = f" (sampling noise alone gives about {noise:.2g}: more records needed)" if noise and value and value < 3 * noise else ""
        findings.judge(check, name, value, limit, what=f"{name}: {words} against the previous run{doubt}", remedy=look)


def _comparable(manifest: Manifest, before: Manifest, findings: Findings) -> set[str]:
    """Features in both runs that were made alike; the others become findings."""
    ours, theirs = _made(manifest), _made(before)
    for name in sorted(ours.keys() - theirs.keys()):
        findings.add(
            "warn", "features_changed", name, f"{name}: new, the previous run did not have it", "a warm start from it is not possible"
        )
    for name in sorted(theirs.keys() - ours.keys()):
        findings.add("warn", "features_changed", name, f"{name}: gone, the previous run had it", "a warm start from it is not possible")
    same = {name for name in ours.keys() & theirs.keys() if ours[name] == theirs[name]}
    for name in sorted((ours.keys() & theirs.keys()) - same):
        message = f"{name}: made otherwise than in the previous run ({theirs[name]}, now {ours[name]})"
        findings.add("warn", "features_changed", name, message, "its values were not compared")
    return same


def _made(manifest: Manifest) -> dict[str, str]:
    """How each feature's values came about, as far as its histogram depends on it."""
    made = dict.fromkeys((d.name for d in manifest.dense), "numeric")
    for slot in manifest.slots:
        made[slot.name] = f"slot of group {slot.group}, hash seed {slot.hash_seed}" + (
            ", bucketised" if slot.boundaries is not None else ""
        )
    return dict(sorted(made.items()))


def _distance(name: str, ours: Statistics, theirs: Statistics, findings: Findings) -> Drift | None:
    if isinstance(ours, DenseStatistics) and isinstance(theirs, DenseStatistics):
        if ours.edges != theirs.edges:
            findings.add(
                "warn",
                "features_changed",
                name,
                f"{name}: counted in other buckets than in the previous run",
                "its values were not compared",
            )
            return None
        return drift(ours.counts, theirs.counts)
    if isinstance(ours, SlotStatistics) and isinstance(theirs, SlotStatistics):
        return drift(ours.bucket_counts, theirs.bucket_counts)
    return None


def _unseen_by_previous(config: Config, current: Side, previous: Side) -> dict[str, float]:
    """Share of sampled id occurrences of train that ``ids/<slot>.npy`` of the previous run lacks, per slot it can be said of."""
    (manifest, data_dir), (before, previous_dir) = current, previous
    names = [slot.name for slot in slots(config)]
    if manifest.rows("train") == 0 or names != [slot.name for slot in manifest.slots]:
        return {}
    seeds, old_seeds = ({slot.name: slot.hash_seed for slot in m.slots} for m in (manifest, before))
    known = {
        name: np.load(path, mmap_mode="r")
        for name in names
        if seeds[name] == old_seeds.get(name) and (path := previous_dir / "ids" / f"{name}.npy").is_file()
    }
    counts = {name: np.zeros(2, np.int64) for name in known}
    for signs_of in _sampled_signs(config, data_dir):
        for name, ids in known.items():
            signs = signs_of[name]
            counts[name] += (int(np.count_nonzero(~_contains(ids, signs))), len(signs))
    return {name: float(unseen / total) for name, (unseen, total) in counts.items() if total}


def _sampled_signs(config: Config, data_dir: Path) -> Iterator[dict[str, npt.NDArray[np.uint64]]]:
    single = [slot.name for slot in slots(config) if not slot.multi_valued]
    multi = [slot.name for slot in slots(config) if slot.multi_valued]
    with ShardReader.open(data_dir, "train") as reader:
        blocks = -(-reader.rows // BLOCK_ROWS)
        for block in np.linspace(0, blocks - 1, min(blocks, SAMPLE_BLOCKS)).astype(np.int64).tolist():
            start = block * BLOCK_ROWS
            batch = reader.read(start, min(start + BLOCK_ROWS, reader.rows))
            signs = {name: batch.signs[:, i] for i, name in enumerate(single)}
            yield signs | {name: bag.values for name, bag in zip(multi, batch.bags, strict=True)}


def _contains(ids: npt.NDArray[np.uint64], signs: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Whether each sign [N] is among the ascending ``ids``."""
    if len(ids) == 0:
        return np.zeros(len(signs), bool)
    return np.asarray(ids[np.minimum(np.searchsorted(ids, signs), len(ids) - 1)] == signs)


def _statistics(config: Config, manifest: Manifest) -> Iterator[tuple[str, str, Statistics]]:
    train = manifest.splits.get("train")
    if train is None:
        return
    yield from ((f.name, "dense", train.dense[f.name]) for f in config.schema_.dense if f.name in train.dense)
    yield from ((f.name, "categorical", train.slots[f.name]) for f in config.schema_.categorical if f.name in train.slots)


def _of(manifest: Manifest, name: str) -> Statistics | None:
    train = manifest.splits.get("train")
    return None if train is None else train.dense.get(name) or train.slots.get(name)


def _constant(statistics: Statistics) -> bool:
    if isinstance(statistics, DenseStatistics):
        present = statistics.rows - statistics.missing
        return present > 0 and statistics.min == statistics.max and statistics.missing == 0
    return statistics.distinct <= 1 and statistics.missing in (0, statistics.rows)


def _unseen_in_test(manifest: Manifest, name: str) -> float | None:
    test = manifest.splits.get("test")
    slot = None if test is None else test.slots.get(name)
    return slot.unseen / slot.ids if slot is not None and slot.ids else None


def _source(config: Config, name: str) -> str:
    columns = {f.name: f.source for f in config.schema_.dense} | {f.name: f.source for f in config.schema_.categorical}
    return columns.get(name, name)
