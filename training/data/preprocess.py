"""Stage ``preprocess``: raw events become shards, statistics and a manifest; malformed records become dead letters.

The pipeline itself is in ``training.data.beam_steps``. Everything is made in a hidden folder beside the output and renamed into
place at the end, so a directory either is finished or does not exist. Equal input and configuration give equal bytes, whatever the
number of workers or the runner.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from training import errors
from training.config import Config
from training.data.manifest import FORMAT_VERSION, Manifest, SourceEntry
from training.data.pieces import WorkFolder
from training.data.raw import Wanted
from training.data.shards import check_shard
from training.data.sources import SourceFile, digest_files, find_files, open_sources
from training.data.transforms import needs_analysis
from training.errors import DataError, SatrapError
from training.events import EventLog

_POLL_SECONDS = 0.2


def data_key(config: Config) -> str:
    """Hex digest of all that decides what ``preprocess`` writes. Raises ``SourceError``.

    That is the data parts of the configuration, the content of the sources and the format version; where files lie and how the
    model is trained play no part.
    """
    return _key(config, digest_files(find_files(config.data.paths)))


def preprocess(
    config: Config, output_dir: Path, *, events: EventLog, num_workers: int = 1, reuse: bool = True, runner: str = "FnApiRunner"
) -> Manifest:
    """Make the data directory ``output_dir`` and return its manifest.

    ``reuse``: return the manifest that is there if it was made from the same sources and configuration; else it is replaced. Runs that
    make the same directory at once take turns.
    ``num_workers``: processes; more than one pays above about 1 GB of input. ``runner``: a Beam runner. Raises ``SourceError``,
    ``DeadLetterError`` (the dead letters then lie in ``<output_dir>.dead``), ``DataError``, ``ConfigError``.
    """
    output_dir = output_dir.absolute()
    sources = digest_files(find_files(config.data.paths))
    key = _key(config, sources)
    if reuse and (manifest := _reusable(output_dir, key, config)):
        return manifest
    with _OutputLock(output_dir, events):
        # Another run may have made what we want while this one waited.
        if reuse and (manifest := _reusable(output_dir, key, config)):
            return manifest
        return _make(config, output_dir, sources, key=key, events=events, runner=(runner, num_workers))


def _make(config: Config, output_dir: Path, sources: list[SourceEntry], *, key: str, events: EventLog, runner: tuple[str, int]) -> Manifest:
    """Build and put in place; the caller holds the output's lock."""
    _check_output(output_dir)
    opened = open_sources([Path(source.path) for source in sources], config.data, Wanted.by(config))
    dead_dir = output_dir.with_name(output_dir.name + ".dead")
    with _BuildFolder(output_dir) as folder, _Progress(folder, opened, config, events):
        try:
            _run(config, folder, opened, sources, key=key, dead_dir=dead_dir, runner=runner)
        except errors.DeadLetterError:
            _remove_dead_letters(dead_dir)
            _replace(folder.root / "dead", dead_dir)
            raise
        manifest = Manifest.load(folder.root)
        shutil.rmtree(folder.root / "work")
        _replace(folder.root, output_dir)
        _remove_dead_letters(dead_dir)
    _note_oddities(manifest, opened, config, events)
    return manifest


def _key(config: Config, sources: list[SourceEntry]) -> str:
    tree = config.to_dict()
    data = {name: value for name, value in tree["data"].items() if name not in ("paths", "max_dead_fraction")}
    content = {
        "format_version": FORMAT_VERSION,
        "data": data,
        "schema": tree["schema"],
        "split": tree["split"],
        "groups": tree["embedding"]["groups"],
        "slices": tree["evaluation"]["slices"],
        "sources": [(Path(source.path).name, source.bytes, source.digest) for source in sources],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _reusable(output_dir: Path, key: str, config: Config) -> Manifest | None:
    """The manifest there, if it has this key, its shards have their content and its malformed records are not too many."""
    if not (output_dir / "manifest.json").exists():
        return None
    try:
        manifest = Manifest.load(output_dir)
        if manifest.data_key != key:
            return None
        for shard in manifest.shards:
            check_shard(output_dir, shard)
    except errors.ManifestError:
        return None
    dead, good = sum(manifest.dead.values()), sum(statistics.rows for statistics in manifest.splits.values())
    tolerable = dead <= config.data.max_dead_fraction * (dead + good)
    return manifest if tolerable else None


def _check_output(output_dir: Path) -> None:
    """Refuse to replace what is no data directory."""
    if output_dir.exists() and not output_dir.is_dir():
        raise DataError(f"{output_dir}: is a file; name a directory that does not exist yet")
    if output_dir.is_dir() and any(output_dir.iterdir()) and not (output_dir / "manifest.json").is_file():
        raise DataError(f"{output_dir}: exists, is not empty and holds no manifest.json; remove it or name another directory")


class _OutputLock:
    """Lets one run at a time make ``output_dir``, among all threads and processes that see its folder; the others wait.

    The lock is of a file beside the output. Whoever gets it checks that the file is still the one of that name, so the holder can
    remove it at the end; the lock of a killed process ends with it.
    """

    def __init__(self, output_dir: Path, events: EventLog) -> None:
        self._path = output_dir.with_name(f".{output_dir.name}.lock")
        self._events = events
        self._file = -1
        self._told = False

    def __enter__(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while not self._acquired():
                pass
        except OSError as error:
            told = f"{self._path.parent}: cannot be written: {error.strerror or error}; name another output directory"
            raise DataError(told) from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _acquired(self) -> bool:
        """Wait for the lock; False if what was locked is no longer the file of that name."""
        file = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            self._wait(file)
            if os.path.samestat(os.fstat(file), self._path.stat()):
                self._file = file
                return True
        except FileNotFoundError:
            return False
        finally:
            if self._file != file:
                os.close(file)
        return False

    def _wait(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not self._told:
                self._events.emit("note", stage="preprocess", message=f"waiting for another run that makes {self._path.name[1:-5]}")
                self._told = True
            fcntl.flock(file, fcntl.LOCK_EX)


class _BuildFolder:
    """A hidden folder beside the output, gone at the end. Folders that killed processes left are removed first.

    Whoever holds the output's lock is the only one who builds.
    """

    def __init__(self, output_dir: Path) -> None:
        self._parent = output_dir.parent
        self._prefix = f".{output_dir.name}.building-"

    def __enter__(self) -> WorkFolder:
        try:
            for left in self._parent.glob(f"{glob.escape(self._prefix)}*"):
                shutil.rmtree(left, ignore_errors=True)
            self._root = Path(tempfile.mkdtemp(prefix=self._prefix, dir=self._parent))
        except OSError as error:
            raise DataError(f"{self._parent}: cannot be written: {error.strerror or error}; name another output directory") from None
        self._root.chmod(0o755)
        folder = WorkFolder(self._root)
        folder.prepare()
        return folder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        shutil.rmtree(self._root, ignore_errors=True)


def _replace(made: Path, target: Path) -> None:
    """Rename ``made`` to ``target``, moving what is there out of the way first."""
    old = None
    if target.exists():
        old = made.with_name(f"{made.name}.old")
        target.rename(old)
    made.rename(target)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _remove_dead_letters(folder: Path) -> None:
    """Remove a folder of dead letters that an earlier run left, and nothing else that may have this name."""
    if folder.is_dir() and all(path.match("part-*.jsonl") for path in folder.iterdir()):
        shutil.rmtree(folder)


class _Progress:
    """A thread that turns what the steps append to the progress file into events."""

    def __init__(self, folder: WorkFolder, files: list[SourceFile], config: Config, events: EventLog) -> None:
        passes = 1 + needs_analysis(config) + (config.split.by == "time")
        self._path = folder.progress()
        self._total = passes * sum(file.bytes for file in files)
        self._events = events
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preprocess progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._events.emit("progress", stage="preprocess", done=self._total, total=self._total)

    def _watch(self) -> None:
        last = -1
        while not self._stop.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError):
                done = min(sum(map(int, self._path.read_text().split("\n")[:-1])), self._total)
                if done != last:
                    self._events.emit("progress", stage="preprocess", done=done, total=self._total)
                    last = done


def _runner(name: str, num_workers: int, folder: WorkFolder) -> Any:
    """A Beam runner. Several workers are processes of their own, whose log lines, mostly noise, go to a file."""
    from apache_beam.runners import create_runner
    from apache_beam.runners.portability.fn_api_runner import FnApiRunner
    from apache_beam.transforms.environments import SubprocessSDKEnvironment

    if num_workers == 1 or name != "FnApiRunner":
        return create_runner(name)
    log = shlex.quote(str(folder.root / "work" / "workers.log"))
    command = f"exec {shlex.quote(sys.executable)} -W ignore -m apache_beam.runners.worker.sdk_worker_main >>{log} 2>&1"
    return FnApiRunner(default_environment=SubprocessSDKEnvironment.from_command_string(command))


def _run(
    config: Config,
    folder: WorkFolder,
    files: list[SourceFile],
    sources: list[SourceEntry],
    *,
    key: str,
    dead_dir: Path,
    runner: tuple[str, int],
) -> None:
    """Run the pipeline; raises the ``SatrapError`` a step wrote down, or ``DataError`` with what the runner says."""
    with _quiet_beam():
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions

        from training.data.beam_steps import Job, build_pipeline

        job = Job(config.to_json(), folder, str(dead_dir), tuple(sources), key)
        options = PipelineOptions([f"--direct_num_workers={runner[1]}"])
        pipeline = beam.Pipeline(_runner(*runner, folder), options=options)
        build_pipeline(pipeline, job, files, config)
        try:
            pipeline.run().wait_until_finish()
        except Exception as error:
            if recorded := _recorded_failure(folder):
                raise recorded from None
            if isinstance(error, SatrapError):
                raise
            raise DataError(f"the Beam pipeline failed: {type(error).__name__}: {error}") from error


def _recorded_failure(folder: WorkFolder) -> SatrapError | None:
    try:
        failure = json.loads(folder.failure().read_text())
    except FileNotFoundError:
        return None
    kind = getattr(errors, failure["kind"], None)
    return kind(failure["text"]) if kind is not None else DataError(failure["text"])


@contextlib.contextmanager
def _quiet_beam() -> Iterator[None]:
    """Beam logs and warns about packages we do not need, at import and at every run; errors reach us as exceptions."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _note_oddities(manifest: Manifest, files: list[SourceFile], config: Config, events: EventLog) -> None:
    if config.data.format in ("csv", "tsv"):
        for file in files:
            if file.header != config.data.header:
                found = (
                    "its first line repeats data.columns and is no record"
                    if file.header
                    else "no header line; read with the columns of the files before it"
                )
                events.emit("note", stage="preprocess", message=f"{file.path}: {found}")
    for split, statistics in manifest.splits.items():
        if not statistics.rows:
            events.emit("note", stage="preprocess", message=f"the {split} split is empty")
        elif statistics.positives in (0, statistics.rows):
            events.emit(
                "note", stage="preprocess", message=f"all {statistics.rows} labels of the {split} split are {int(statistics.positives > 0)}"
            )
    if manifest.dead:
        reasons = ", ".join(f"{reason} {count}" for reason, count in manifest.dead.items())
        events.emit("note", stage="preprocess", message=f"{sum(manifest.dead.values())} malformed records are in dead/: {reasons}")
