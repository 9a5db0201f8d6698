"""A role process in a pod of a gang: which one it is, where the others are, and where it goes on when the gang was started again.

All addresses are known before anything runs (``Job.peers``): pods have DNS names, processes have ports. So nothing is announced; whoever
needs another role connects until somebody answers.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from training.checkpoint import newest_checkpoint
from training.config import TrainingConfig
from training.errors import CheckpointError, RoleError
from training.job import Job, Rendezvous, RoleName

POD_INDEX = "JOB_COMPLETION_INDEX"
"""Which pod of its role this is; Kubernetes sets it in the pods of an Indexed Job."""
PROCESSES, PROCESS = "SATRAP_PROCESSES", "SATRAP_PROCESS"
"""Role processes per pod, and which of its pod's this is."""
POD_IP = "SATRAP_POD_IP"
"""Address of the pod: where its processes listen."""
RESTARTS = "SATRAP_RESTARTS"
"""How often the gang was started again."""
CONNECT_SECONDS = 5.0
LOOK_SECONDS = 0.2


def index_of(environment: Mapping[str, str]) -> int:
    """Index of this process among those of its role. Raises ``RoleError`` where the environment does not tell."""
    pod, processes, process = (_number(environment, name) for name in (POD_INDEX, PROCESSES, PROCESS))
    if not 0 <= process < processes:
        raise RoleError(f"{PROCESS}={process}: a pod with {PROCESSES}={processes} has processes 0 to {processes - 1}")
    return pod * processes + process


def resumed(job: Job, environment: Mapping[str, str]) -> Job:
    """The job as a pod takes it up: after a restart from the newest checkpoint of this run, if it has written one.

    All pods find the same one: while any of them is not there yet nothing is trained.
    """
    if not job.peers or not int(environment.get(RESTARTS) or 0):
        return job
    try:
        newest = newest_checkpoint(Path(job.output_dir))
    except CheckpointError:
        return job
    return job.model_copy(update={"resume": str(newest), "warm_start": None})


class PodRendezvous(Rendezvous):
    """Finding the other roles by their DNS names. A context manager: leaving it closes what ``announce`` opened."""

    def __init__(self, job: Job, environment: Mapping[str, str]) -> None:
        timeout = job.config.training.start_timeout_seconds
        super().__init__(Path(job.rendezvous), timeout)
        self._peers = job.peers
        self._seconds = timeout
        self._environment = environment
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # Wakes accept; close alone does not.
            sock.close()
        for thread in self._threads:
            thread.join()

    def listen_address(self, training: TrainingConfig, role: RoleName, index: int) -> str:  # noqa: ARG002 - pods know one transport
        """The pod's own address and the process's port. Raises ``RoleError`` where the environment does not tell the address."""
        host = self._environment.get(POD_IP) or ""
        if not host:
            raise RoleError(f"{POD_IP} is not set: it must hold the address of this pod (status.podIP)")
        return f"tcp:{host}:{self._peers[role][index].rpartition(':')[2]}"

    def announce(self, role: RoleName, index: int, address: str) -> None:  # noqa: ARG002 - known to all already
        """Servers are found by the port they listen on already; a rank opens its port to say that it has come so far."""
        if role != "nn_worker":
            return
        _, host, port = self.listen_address(TrainingConfig(), role, index).split(":")
        try:
            sock = socket.create_server((host, int(port)))
        except OSError as error:
            raise RoleError(f"{role}-{index} cannot listen at {host}:{port}: {error.strerror or error}") from None
        self._open.append(sock)
        thread = threading.Thread(target=_answer, args=(sock,), name=f"announce {role}-{index}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def addresses(self, role: RoleName, count: int) -> list[str]:
        """Connect until each of the role's first ``count`` processes has answered; raises ``RoleError`` naming those that did not."""
        deadline = time.monotonic() + self._seconds
        found: dict[int, str] = {}
        reasons: dict[int, str] = {}
        while len(found) < count:
            for index in range(count):
                if index in found:
                    continue
                host, _, port = self._peers[role][index].rpartition(":")
                try:
                    with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as probe:
                        found[index] = f"tcp:{probe.getpeername()[0]}:{port}"
                except OSError as error:
                    reasons[index] = f"{role}-{index} at {host}:{port} ({error.strerror or error})"
            if len(found) < count:
                if time.monotonic() > deadline:
                    missing = ", ".join(reasons[index] for index in range(count) if index not in found)
                    raise RoleError(f"not there after {self._seconds:g} s: {missing}; see its pod, or raise training.start_timeout_seconds")
                time.sleep(LOOK_SECONDS)
        return [found[index] for index in range(count)]


def rendezvous_of(job: Job) -> Rendezvous:
    """How a process of the job finds the others: by their names in a gang of pods, else by files."""
    if job.peers:
        return PodRendezvous(job, os.environ)
    return Rendezvous(Path(job.rendezvous), job.config.training.start_timeout_seconds)


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise RoleError(f"{name}={text!r}: which process is this? give --index, or start it in a pod of a JobSet made by satrap")
    return int(text)


def _answer(sock: socket.socket) -> None:
    while True:
        try:
            client, _ = sock.accept()
        except OSError:
            return
        client.close()
