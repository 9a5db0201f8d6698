"""What a process or pod of a role runs: ``run_role`` builds the role from the job description and serves until it is done or told to stop.

Exit status 0: done, or told to stop by SIGTERM; an nn_worker told to stop is not done: 143. Status 1: a ``SatrapError``, 3: one that only
says that another role is gone; its text is the last line on standard error and stands in ``failure-<role>-<index>.txt`` of the
rendezvous directory.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from training.errors import RoleError, SatrapError, TransportError
from training.job import ROLES, Job, RoleName, total_steps
from training.pod import rendezvous_of, resumed

if TYPE_CHECKING:
    from training.embedding.transport import Handler

PR_SET_PDEATHSIG = 1
HEARTBEAT_SECONDS = 1.0
RESULT = "result.json"
OWN_FAULT, LOST_PEER = 1, 3
"""Exit status of a role that failed by itself, and of one that another role's end took along: only the latter is worth another try."""


def run_role(name: str, *, index: int, job: Path) -> int:
    """Run one role process to its end; returns its exit status."""
    if name not in ROLES:
        raise RoleError(f"{name!r} is no role; roles are {', '.join(ROLES)}")
    role = name
    try:
        description = resumed(Job.model_validate_json(job.read_bytes()), os.environ)
    except FileNotFoundError:
        raise RoleError(f"{job}: no such file; a role needs the job.json that `satrap train` wrote") from None
    except ValueError:
        raise RoleError(f"{job}: not a job description; a role needs the job.json that `satrap train` wrote") from None
    if not 0 <= index < description.count(role):
        raise RoleError(f"{role} has {description.count(role)} process(es) in this job; index {index} is not one of them")
    try:
        with _heartbeat(Path(description.rendezvous, f"alive-{role}-{index}")):
            _RUNNERS[role](description, index)
    except SatrapError as error:
        Path(description.rendezvous, f"failure-{role}-{index}.txt").write_text(str(error), encoding="utf-8")
        sys.stderr.write(f"error: {error}\n")
        return _status(error)
    return 0


def _status(error: SatrapError) -> int:
    # torch tells of a lost rank by a RuntimeError, which the rank's own error names as its cause.
    lost = isinstance(error, TransportError | RoleError) or isinstance(error.__cause__, RuntimeError)
    return LOST_PEER if lost else OWN_FAULT


def _run_parameter_server(job: Job, index: int) -> None:
    from training.embedding.parameter_server import ParameterServer
    from training.embedding.slots import tables

    training = job.config.training
    with (
        job.timeline("parameter_server", index) as timeline,
        ParameterServer.create(
            tables(job.config),
            num_servers=job.count("parameter_server"),
            seed=training.seed,
            wire_dtype=training.wire_dtype,
            sync_ranks=training.roles.nn_worker if training.mode == "sync" else 0,
            timeout_seconds=training.request_timeout_seconds,
            timeline=timeline,
        ) as server,
    ):
        _serve(job, "parameter_server", index, server.handle)


def _run_embedding_worker(job: Job, index: int) -> None:
    from training.embedding.embedding_worker import EmbeddingWorker
    from training.embedding.slots import slots

    training = job.config.training
    servers = rendezvous_of(job).addresses("parameter_server", job.count("parameter_server"))
    transport = job.transport()
    sync = training.mode == "sync"
    with (
        job.timeline("embedding_worker", index) as timeline,
        EmbeddingWorker(slots(job.config), transport, servers, wire_dtype=training.wire_dtype, sync=sync, timeline=timeline) as worker,
    ):
        _serve(job, "embedding_worker", index, worker.handle)


def _run_data_loader(job: Job, index: int) -> None:
    from training.data.data_loader import DataLoader, LoaderSettings
    from training.data.manifest import Manifest
    from training.data.shards import BatchPlan, ShardReader

    training = job.config.training
    data_dir, ranks = Path(job.data_dir), training.roles.nn_worker
    settings = LoaderSettings(
        index=index,
        num_loaders=job.count("data_loader"),
        num_ranks=ranks,
        batch_size=training.batch_size,
        first_step=job.first_step,
        last_step=total_steps(job.config, Manifest.load(data_dir)),
        depth=training.staleness_bound + 2,
        timeout_seconds=training.request_timeout_seconds,
    )
    workers = rendezvous_of(job).addresses("embedding_worker", job.count("embedding_worker"))
    with ShardReader.open(data_dir, "train") as reader, job.timeline("data_loader", index) as timeline:
        plan = BatchPlan(
            reader.shard_starts,
            rows_per_step=training.batch_size * ranks,
            seed=training.seed,
            shuffle=training.shuffle,
            window_shards=training.shuffle_window_shards,
        )
        with DataLoader(reader, plan, job.transport(), workers, settings=settings, timeline=timeline) as loader:
            _serve(job, "data_loader", index, loader.handle)


def _run_nn_worker(job: Job, index: int) -> None:
    from training.dense.session import train_rank

    with _stopping_raises(), rendezvous_of(job) as rendezvous:
        train_rank(job, index, rendezvous)
    if job.peers and index == 0:  # The pod and its directory go; whoever launched the gang reads the result where the output is.
        shutil.copyfile(Path(job.rendezvous, RESULT), Path(job.output_dir, RESULT))


_RUNNERS = {
    "parameter_server": _run_parameter_server,
    "embedding_worker": _run_embedding_worker,
    "data_loader": _run_data_loader,
    "nn_worker": _run_nn_worker,
}


def _serve(job: Job, role: RoleName, index: int, handler: Handler) -> None:
    """Answer requests until SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())
    rendezvous = rendezvous_of(job)
    with job.transport().serve(handler, rendezvous.listen_address(job.config.training, role, index)) as server:
        rendezvous.announce(role, index, server.address)
        stop.wait()


def _stopping_raises() -> ExitStack:
    """While open, SIGTERM ends the main thread's work as an exception, so that files and sockets are closed."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    stack = ExitStack()
    stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, stop))
    return stack


@contextmanager
def _heartbeat(path: Path) -> Iterator[None]:
    """Touch a file every second: a process that is stopped or starved stops doing so, and the launcher notices."""
    ended = threading.Event()

    def beat() -> None:
        while True:
            with suppress(OSError):  # The directory is gone: the run is over.
                path.touch()
            if ended.wait(HEARTBEAT_SECONDS):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its launcher dies, however it dies (Linux)."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It died before the call above.
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    """What ``training.launcher`` starts; people use ``satrap role``."""
    parser = argparse.ArgumentParser(prog="python -m training.roles")
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id of the launcher")
    given = parser.parse_args(arguments)
    die_with(given.parent)
    # Only the launcher decides what Ctrl-C means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return run_role(given.role, index=given.index, job=given.job)


if __name__ == "__main__":
    sys.exit(main())
