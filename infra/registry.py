"""The local model registry: immutable numbered versions of a model and a ``champion`` among them.

::

    <root>/<name>/
        v1/ v2/ ...            version.json, evaluation.json and checkpoint/, files read-only
        champion -> v2         symbolic link, replaced atomically
        refusals.jsonl         candidates the gate refused: when, which run, which numbers
        .lock                  held while registering; names the holder
        .incoming-*            a copy under way, or left by a killed process and removed by the next registration
        .promoting             a promotion under way, finished by the next registration if its process was killed

A candidate becomes a version only if the gate promotes it. A refused one is written to ``refusals.jsonl`` with its reason and copied
nowhere: it would take the space of a whole model, nothing may ever serve it, and its checkpoint stays in its run's directory anyway.

Readers need no lock: a version appears by one rename when all its files are on disk, and the champion changes by one rename.
Directories stay writable so that a registry can be deleted by its owner; ``verify`` finds files that were changed, lost or added.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from infra.gate import decide
from training.checkpoint import CheckpointManifest, file_digest
from training.config import Config, MetricName
from training.errors import CheckpointError, RegistryError, SatrapError
from training.evaluation_record import EvaluationRecord, checkpoint_digest

FORMAT_VERSION = 1
CHAMPION = "champion"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_CHUNK_BYTES = 4 * 1024 * 1024


class VersionRecord(BaseModel):
    """The content of ``version.json``; immutable like the files it describes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: int
    name: str
    version: int
    run_id: str
    created: str
    """UTC, ISO 8601."""
    reason: str
    """Why the gate promoted it."""
    checkpoint_digest: str
    """See ``training.evaluation_record.checkpoint_digest``."""
    config_digest: str
    feature_digest: str
    metrics: dict[MetricName, float | None]
    """On the test split it was promoted with."""
    replaced: int | None
    """The champion before it."""
    files: dict[str, str]
    """Hex xxh3-128 per file, by path relative to the version's directory; all but ``version.json`` itself."""


@dataclass(frozen=True)
class Version:
    """A version that exists."""

    path: Path
    record: VersionRecord

    @property
    def number(self) -> int:
        """1, 2, 3, ..."""
        return self.record.version

    @property
    def checkpoint(self) -> Path:
        """Its checkpoint directory: to score with, or to warm-start from."""
        return self.path / "checkpoint"


@dataclass(frozen=True)
class Registration:
    """What became of a candidate."""

    version: int | None
    """None: refused."""
    promoted: bool
    reason: str


class Registry:
    """Models under one root directory. Holds nothing open between calls."""

    def __init__(self, root: Path, *, lock_timeout_seconds: float = 600.0) -> None:
        self.root = root
        self.lock_timeout_seconds = lock_timeout_seconds
        """How long ``register`` waits for another process that registers the same model."""

    @classmethod
    def of(cls, config: Config) -> Registry:
        """The registry of a configuration: ``<output.root>/registry``."""
        return cls(Path(config.output.root).absolute() / "registry")

    def register(self, name: str, *, checkpoint: Path, evaluation: Path, config: Config, run_id: str) -> Registration:
        """Put a candidate before the gate; make it the next version and the champion if the gate lets it.

        ``evaluation``: the ``evaluation.json`` of this checkpoint. Registering the checkpoint that is champion already changes nothing, so
        a step that is repeated does no harm. Raises ``RegistryError`` if the evaluation is of another checkpoint or model, if it compared
        with another champion than the present one, if the checkpoint is damaged, or if copying fails (nothing is visible then).
        """
        directory = self._directory(name)
        record = _evaluation_of(checkpoint, evaluation, name)
        try:
            with self._locked(directory):
                _finish_interrupted(directory)
                return self._decide(record, checkpoint=checkpoint, evaluation=evaluation, config=config, run_id=run_id)
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            raise RegistryError(
                f"{directory}: registering failed: {error.strerror or error}{where}; free space or fix the permissions, then register again"
            ) from error

    def _decide(self, record: EvaluationRecord, *, checkpoint: Path, evaluation: Path, config: Config, run_id: str) -> Registration:
        name, directory = record.name, self._directory(record.name)
        champion = self.champion(name)
        if champion is not None and champion.record.checkpoint_digest == record.candidate.checkpoint_digest:
            return Registration(champion.number, True, f"registered before, as v{champion.number}: {champion.record.reason}")
        self._check_champion(champion, record)
        decision = decide(config.evaluation.gate, record)
        if not decision.promote:
            _append_refusal(directory, record, run_id=run_id, reason=decision.reason)
            return Registration(None, False, decision.reason)
        draft = VersionRecord(
            format_version=FORMAT_VERSION,
            name=name,
            version=max(_numbers(directory), default=0) + 1,
            run_id=run_id,
            created=_now(),
            reason=decision.reason,
            checkpoint_digest=record.candidate.checkpoint_digest,
            config_digest=config.digest,
            feature_digest=record.feature_digest,
            metrics=record.candidate.metrics,
            replaced=None if champion is None else champion.number,
            files={},
        )
        _publish(directory, draft, checkpoint=checkpoint, evaluation=evaluation)
        return Registration(draft.version, True, decision.reason)

    def champion(self, name: str) -> Version | None:
        """The promoted version, by its real path (so that it stays the same when the alias moves); None if there is none yet."""
        link = self._directory(name) / CHAMPION
        try:
            target = link.readlink()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RegistryError(
                f"{link}: not the symbolic link it should be ({error.strerror}); restore it with `ln -sfn vN {link}`"
            ) from None
        path = link.parent / target
        if not path.is_dir():
            raise RegistryError(f"{link} points to {target}, which is gone; point it to another version with `ln -sfn vN {link}`")
        return _load(path)

    def versions(self, name: str) -> list[Version]:
        """All versions, ascending."""
        directory = self._directory(name)
        return [_load(directory / f"v{number}") for number in _numbers(directory)]

    def version(self, name: str, number: int) -> Version:
        """One version; raises ``RegistryError`` if it does not exist."""
        path = self._directory(name) / f"v{number}"
        if not path.is_dir():
            there = [f"v{known}" for known in _numbers(path.parent)]
            raise RegistryError(f"{name} has no version v{number}; it has {', '.join(there) or 'none'}")
        return _load(path)

    def refusals(self, name: str) -> list[dict[str, object]]:
        """Refused candidates, oldest first: ``time``, ``run_id``, ``reason``, ``metrics``, ``checkpoint``, ``checkpoint_digest``."""
        path = self._directory(name) / "refusals.jsonl"
        if not path.exists():
            return []
        text = path.read_text(encoding="utf-8")
        # A line without its end is of a process killed while writing it.
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]

    def verify(self, name: str, number: int) -> Version:
        """Read every file of a version; raises ``RegistryError`` naming the files that were changed, lost or added."""
        version = self.version(name, number)
        found = {path.relative_to(version.path).as_posix() for path in version.path.rglob("*") if not path.is_dir()} - {"version.json"}
        expected = version.record.files
        problems = [f"{file} is missing" for file in sorted(expected.keys() - found)]
        problems += [f"{file} was added" for file in sorted(found - expected.keys())]
        problems += [
            f"{file} was changed" for file in sorted(found & expected.keys()) if file_digest(version.path / file) != expected[file]
        ]
        if problems:
            raise RegistryError(f"{version.path}: damaged: {'; '.join(problems)}. Use another version, or train again")
        return version

    def _directory(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise RegistryError(f"{name!r} cannot name a model: use letters, digits, '_', '.', '-', at most 64, a letter or '_' first")
        return self.root / name

    def _check_champion(self, champion: Version | None, record: EvaluationRecord) -> None:
        name = record.name
        compared = None if record.champion is None else record.champion.checkpoint_digest
        present = None if champion is None else champion.record.checkpoint_digest
        if compared == present:
            return
        before = next((f"v{v.number}" for v in reversed(self.versions(name)) if v.record.checkpoint_digest == compared), None)
        then = before or ("none" if record.champion is None else record.champion.checkpoint)
        now = "none" if champion is None else f"v{champion.number}"
        other = "" if champion is None else f" (with --champion {champion.path})"
        raise RegistryError(f"{name}: the champion moved from {then} to {now} since evaluation: run evaluate again{other}, then register")

    @contextmanager
    def _locked(self, directory: Path) -> Iterator[None]:
        """Exclusive between processes and threads; the kernel releases it when its holder dies."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RegistryError(f"{directory}: cannot be written ({error.strerror}); choose another output.root") from None
        try:
            deadline = time.monotonic() + self.lock_timeout_seconds
            while not _try_lock(descriptor):
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
                    raise RegistryError(
                        f"{directory}: process {holder or '?'} has been registering for over {self.lock_timeout_seconds:g} s; "
                        "wait for it or end it, then register again"
                    )
                time.sleep(0.05)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(descriptor)


def _numbers(directory: Path) -> list[int]:
    return sorted(int(path.name[1:]) for path in directory.glob("v*") if re.fullmatch(r"v[1-9][0-9]*", path.name))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _evaluation_of(checkpoint: Path, evaluation: Path, name: str) -> EvaluationRecord:
    """Read the evaluation; raises ``RegistryError`` unless it is of this model name and checkpoint."""
    try:
        record, digest = EvaluationRecord.load(evaluation), checkpoint_digest(checkpoint)
    except SatrapError as error:
        raise RegistryError(f"nothing to register: {error}") from None
    if record.name != name:
        raise RegistryError(f"{evaluation} is of model {record.name!r}, not {name!r}; evaluate with the configuration of {name!r}")
    if record.candidate.checkpoint_digest != digest:
        raise RegistryError(
            f"{evaluation} is of checkpoint {record.candidate.checkpoint}, not of {checkpoint}; run evaluate on {checkpoint}"
        )
    return record


def _publish(directory: Path, draft: VersionRecord, *, checkpoint: Path, evaluation: Path) -> None:
    """Copy, flush, rename, move the alias. Whatever fails before the rename leaves nothing visible."""
    incoming = Path(tempfile.mkdtemp(prefix=".incoming-", dir=directory))
    try:
        copied = _copy_tree(checkpoint, incoming / "checkpoint")
        _check_copied(checkpoint, copied)
        files = {f"checkpoint/{path}": digest for path, digest in copied.items()}
        files["evaluation.json"] = _copy(evaluation, incoming / "evaluation.json")
        _write(incoming / "version.json", draft.model_copy(update={"files": files}).model_dump_json(indent=2) + "\n")
        (incoming / "version.json").chmod(0o444)
        incoming.chmod(0o755)
        _flush_directories(incoming)
        _write(directory / ".promoting", f"v{draft.version}\n")
        _flush(directory)
        incoming.rename(directory / f"v{draft.version}")
        _finish_promotion(directory)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def _finish_interrupted(directory: Path) -> None:
    """Clear up after a process that was killed while registering; the lock is held, so nobody else is at it."""
    for leftover in directory.glob(".incoming-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in directory.glob(".champion-*"):
        leftover.unlink()
    _finish_promotion(directory)


def _finish_promotion(directory: Path) -> None:
    """Point the alias to the version that ``.promoting`` names, if its directory made it; then forget the intention."""
    intention = directory / ".promoting"
    if not intention.exists():
        return
    text = intention.read_text(encoding="utf-8")
    target = text.strip()
    # Without its line end it is of a process killed while writing it, before its version was there.
    if text.endswith("\n") and (directory / target).is_dir():
        link = directory / f".champion-{os.getpid()}"
        link.symlink_to(target)
        link.replace(directory / CHAMPION)
    intention.unlink()
    _flush(directory)


def _append_refusal(directory: Path, record: EvaluationRecord, *, run_id: str, reason: str) -> None:
    candidate = record.candidate
    entry = {
        "time": _now(),
        "run_id": run_id,
        "reason": reason,
        "metrics": candidate.metrics,
        "checkpoint": candidate.checkpoint,
        "checkpoint_digest": candidate.checkpoint_digest,
    }
    path = directory / "refusals.jsonl"
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # drops what a killed process left of a line
        file.write(json.dumps(entry).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _copy_tree(source: Path, target: Path) -> dict[str, str]:
    """Copy all regular files, read-only and flushed. Returns digests by relative path; anything else than files is refused."""
    digests = {}
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source).as_posix()
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RegistryError(f"{path}: neither a file nor a directory; a version holds plain files only")
        if path.is_file():
            digests[relative] = _copy(path, target / relative)
    return digests


def _copy(source: Path, target: Path) -> str:
    """Copy a file, flushed and read-only; returns the hex xxh3-128 of what was read."""
    digest = xxhash.xxh3_128()
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(_CHUNK_BYTES):
            digest.update(chunk)
            writer.write(chunk)
        writer.flush()
        os.fsync(writer.fileno())
    target.chmod(0o444)
    return str(digest.hexdigest())


def _check_copied(checkpoint: Path, copied: dict[str, str]) -> None:
    """What was copied must be what the training wrote: a checkpoint damaged since must not become a version."""
    try:
        files = CheckpointManifest.load(checkpoint, verify=False).files
    except CheckpointError as error:
        raise RegistryError(f"nothing was registered: {error}") from None
    for file, digest in files.items():
        if copied.get(file) != digest:
            state = "damaged (its digest differs from the checkpoint's manifest)" if file in copied else "missing"
            raise RegistryError(f"{checkpoint / file}: {state}; nothing was registered. Train again or choose another checkpoint")


def _load(path: Path) -> Version:
    try:
        record = VersionRecord.model_validate_json((path / "version.json").read_bytes())
    except OSError as error:
        raise RegistryError(
            f"{path / 'version.json'}: cannot be read ({error.strerror}); the version is damaged, use another one"
        ) from None
    except ValidationError:
        raise RegistryError(f"{path / 'version.json'}: damaged or of another satrap; use another version") from None
    if record.format_version != FORMAT_VERSION:
        raise RegistryError(f"{path / 'version.json'}: format version {record.format_version}, this satrap reads {FORMAT_VERSION}")
    return Version(path, record)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_directories(top: Path) -> None:
    for path in [top, *(path for path in top.rglob("*") if path.is_dir())]:
        _flush(path)


def _flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
