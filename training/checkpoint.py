"""A checkpoint directory, complete or absent.

::

    manifest.json                                 written last: what follows is there and unchanged
    config.json                                   the resolved configuration, canonical JSON
    dense.pt                                      state dicts of network and optimizer, progress
    embedding/server-<i>-of-<n>/table-<t>/*.npy   rows with their optimizer state, written by their servers in parallel

It is built under a temporary name, flushed, and renamed: a reader sees a whole checkpoint or none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from training.config import Config
from training.config_file import parse_config
from training.errors import CheckpointError

FORMAT_VERSION = 1


class ServerPart(BaseModel):
    """What one parameter server wrote."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: str
    """Relative to the checkpoint."""
    tables: list[dict[str, Any]]
    """What ``EmbeddingTable.snapshot`` returned, per table."""


class CheckpointManifest(BaseModel):
    """The content of ``manifest.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    name: str
    step: int
    """Steps trained; training goes on with the step of this number."""
    steps_per_epoch: int
    config_digest: str
    feature_digest: str
    """``Manifest.feature_digest`` of the data it was trained on."""
    fingerprint: str
    """``Manifest.fingerprint`` of the data it was trained on."""
    rows: dict[str, int]
    """Embedding rows per table."""
    parts: list[ServerPart]
    metrics: dict[str, float]
    """Last metrics on the valid split."""
    best_step: int | None = None
    """Under early stopping, the step of the best checkpoint so far."""
    files: dict[str, str]
    """Hex xxh3-128 per file, by path relative to the checkpoint."""

    @classmethod
    def load(cls, checkpoint: Path, *, verify: bool = True) -> CheckpointManifest:
        """Read ``manifest.json`` and check every file's digest; raises ``CheckpointError`` naming the first damaged file."""
        path = checkpoint / "manifest.json"
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(
                f"{checkpoint}: no manifest.json, so not a complete checkpoint; give a directory that `satrap train` finished"
            ) from None
        except ValidationError as error:
            raise CheckpointError(f"{path}: damaged or of another version ({error.error_count()} problems)") from None
        if manifest.format_version != FORMAT_VERSION:
            raise CheckpointError(f"{path}: format version {manifest.format_version}, this satrap reads {FORMAT_VERSION}")
        if verify:
            for name, digest in manifest.files.items():
                if not (checkpoint / name).is_file():
                    raise CheckpointError(f"{checkpoint / name}: missing from the checkpoint")
                if file_digest(checkpoint / name) != digest:
                    raise CheckpointError(f"{checkpoint / name}: damaged (its digest differs from the manifest's); use another checkpoint")
        return manifest


def load_config_of(checkpoint: Path) -> Config:
    """The configuration a checkpoint was trained with."""
    try:
        return parse_config((checkpoint / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{checkpoint}: no config.json, so not a complete checkpoint") from None


@contextmanager
def new_checkpoint(final: Path) -> Iterator[Path]:
    """A directory to fill; renamed to ``final`` at the end, removed on failure. The caller writes ``manifest.json`` last."""
    building = final.with_name(f".building-{final.name}")
    for left in final.parent.glob(".building-*"):  # One run writes here; what lies around is of a process that was killed.
        shutil.rmtree(left, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        yield building
        for folder in (*(path for path in building.rglob("*") if path.is_dir()), building):
            _flush(folder)
        if final.exists():
            raise CheckpointError(f"{final}: exists already; a checkpoint is never overwritten")
        building.rename(final)
        _flush(final.parent)
    except OSError as error:
        raise CheckpointError(
            f"{final}: cannot be written: {error.strerror or error}; free space or choose another output directory"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def digests(directory: Path) -> dict[str, str]:
    """Digest per file below a directory, sorted by path; each file is flushed to disk."""
    found = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        found[str(path.relative_to(directory))] = file_digest(path)
    return found


def file_digest(path: Path) -> str:
    """Hex xxh3-128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return str(digest.hexdigest())


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint a path means: itself, or the newest below a training output directory. Raises ``CheckpointError``."""
    if (path / "manifest.json").is_file():
        return path
    found = {}
    for candidate in (path / "checkpoint", *(path / "checkpoints").glob("step-*")):
        try:
            found[candidate] = CheckpointManifest.load(candidate, verify=False).step
        except CheckpointError:
            continue  # Half deleted, or damaged: the one before it may be whole.
    if not found:
        raise CheckpointError(
            f"{path}: holds no complete checkpoint; give a checkpoint directory or the output directory of `satrap train`"
        )
    return max(found, key=lambda candidate: found[candidate])


def check_resumable(checkpoint: Path, config: Config, *, fingerprint: str | None = None) -> None:
    """Raise ``CheckpointError`` listing what differs, unless going on from the checkpoint continues the same run.

    ``fingerprint`` is that of the data, if they are there already.
    """
    manifest = CheckpointManifest.load(checkpoint)
    theirs, ours = load_config_of(checkpoint).to_dict(), config.to_dict()
    problems = _differences(theirs, ours, ("schema", "split", "embedding", "model"))
    for key in ("mode", "batch_size", "seed", "shuffle", "shuffle_window_shards", "dense_optimizer", "averaging_period", "wire_dtype"):
        if theirs["training"][key] != ours["training"][key]:
            problems.append(f"training.{key} is {ours['training'][key]!r}, was {theirs['training'][key]!r}")
    metrics = [(c["training"]["early_stopping"] or {}).get("metric") for c in (theirs, ours)]
    if metrics[0] != metrics[1]:
        problems.append(f"training.early_stopping.metric is {metrics[1]}, was {metrics[0]}")
    if theirs["training"]["roles"]["nn_worker"] != ours["training"]["roles"]["nn_worker"]:
        problems.append("training.roles.nn_worker differs")
    if fingerprint is not None and manifest.fingerprint != fingerprint:
        problems.append("the data differ (another fingerprint)")
    if problems:
        raise CheckpointError(
            f"{checkpoint}: cannot be resumed: {'; '.join(problems)}. Restore these settings, or use it as a warm start instead"
        )
    steps = config.training.epochs * manifest.steps_per_epoch
    last = min(steps, config.training.max_steps or steps)
    if manifest.step > last:
        raise CheckpointError(
            f"{checkpoint}: is of step {manifest.step}, beyond the run's end at {last}: raise training.epochs or training.max_steps"
        )


def check_warm_startable(checkpoint: Path, config: Config, *, feature_digest: str) -> None:
    """Raise ``CheckpointError`` unless the checkpoint's rows and network fit the configuration and data."""
    manifest = CheckpointManifest.load(checkpoint)
    theirs, ours = load_config_of(checkpoint).to_dict(), config.to_dict()
    problems = _differences(theirs, ours, ("embedding", "model"))
    if theirs["training"]["dense_optimizer"]["name"] != ours["training"]["dense_optimizer"]["name"]:
        problems.append("training.dense_optimizer.name differs")
    if manifest.feature_digest != feature_digest:
        problems.append("the data have other features")
    if problems:
        raise CheckpointError(f"{checkpoint}: cannot be a warm start: {'; '.join(problems)}. Use the same settings, or start without it")


def _differences(theirs: dict[str, Any], ours: dict[str, Any], sections: tuple[str, ...]) -> list[str]:
    """Sections of which more differs than how many rows are kept."""
    return [f"{name} differs" for name in sections if theirs[name] | {"capacity_rows": 0} != ours[name] | {"capacity_rows": 0}]


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
