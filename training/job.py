"""What the roles of one training run share: the job description, and where each finds the others.

The rendezvous directory holds one small file per role process with its address. A role announces itself once it can answer, and
waits for the announcements it needs: servers, then workers, then loaders, then ranks. Pods find one another by names: ``training.pod``.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self

from pydantic import BaseModel, ConfigDict

from training.checkpoint import CheckpointManifest
from training.config import Config, TrainingConfig
from training.config_file import parse_config
from training.data.manifest import Manifest
from training.errors import RoleError, TrainingError
from training.profile import FOLDER, Timeline

if TYPE_CHECKING:
    from training.embedding.sockets import SocketTransport

RoleName = Literal["parameter_server", "embedding_worker", "data_loader", "nn_worker"]
ROLES: tuple[RoleName, ...] = ("parameter_server", "embedding_worker", "data_loader", "nn_worker")
"""In the order they depend on one another."""


class Job(BaseModel):
    """The content of ``job.json``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    config_json: str
    data_dir: str
    output_dir: str
    token: str
    """Every connection between roles shows it first; job.json is readable by its owner only."""
    rendezvous: str
    """Directory all roles of a machine can reach; also holds the Unix sockets of a local run."""
    events: str
    peers: dict[RoleName, list[str]] = {}
    """``host:port`` of every process by role, in a gang of pods; empty: they find one another by files in ``rendezvous``."""
    resume: str | None = None
    """Checkpoint to go on from: rows, dense network, optimizers, position."""
    warm_start: str | None = None
    """Checkpoint to start from: rows, dense network and optimizers, at the beginning of new data."""

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return parse_config(self.config_json)

    def transport(self, timeout_seconds: float | None = None) -> SocketTransport:
        """How this job's roles reach one another; an answer may take ``training.request_timeout_seconds`` unless told otherwise."""
        from training.embedding.sockets import SocketTransport, is_loopback

        training = self.config.training
        return SocketTransport(
            timeout_seconds or training.request_timeout_seconds,
            self.token,
            shared_memory=training.transport == "shared_memory",
            open_to_network=not is_loopback(training.tcp_host),
        )

    @property
    def first_step(self) -> int:
        """Steps before it were trained by the run that is resumed."""
        return CheckpointManifest.load(Path(self.resume), verify=False).step if self.resume else 0

    def timeline(self, role: RoleName, index: int) -> Timeline:
        """Where a role process notes its times."""
        steps = range(self.first_step, self.first_step + self.config.training.profile_steps)
        return Timeline(f"{role}-{index}", steps=steps, folder=Path(self.output_dir) / FOLDER)

    def count(self, role: RoleName) -> int:
        """Processes of a role."""
        return int(getattr(self.config.training.roles, role))


class Rendezvous:
    """Announcing and finding addresses through files."""

    def __init__(self, directory: Path, timeout_seconds: float) -> None:
        self._directory = directory
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close what was opened for being found: nothing here."""

    def listen_address(self, training: TrainingConfig, role: RoleName, index: int) -> str:
        """Where a role should listen."""
        return f"tcp:{training.tcp_host}:0" if training.transport == "tcp" else f"unix:{self._directory}/{role}-{index}.sock"

    def announce(self, role: RoleName, index: int, address: str) -> None:
        """Make the role findable; it must be able to answer already."""
        path = self._directory / f"{role}-{index}.json"
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"address": address, "pid": os.getpid()}))
        temporary.replace(path)

    def addresses(self, role: RoleName, count: int) -> list[str]:
        """Wait for all processes of a role; raises ``RoleError`` naming those that did not come."""
        deadline = time.monotonic() + self._timeout_seconds
        paths = [self._directory / f"{role}-{index}.json" for index in range(count)]
        while missing := [path.stem for path in paths if not path.exists()]:
            if time.monotonic() > deadline:
                raise RoleError(
                    f"{', '.join(missing)} did not come up within {self._timeout_seconds:g} s; see its log, "
                    "or raise training.start_timeout_seconds"
                )
            time.sleep(0.02)
        return [str(json.loads(path.read_text())["address"]) for path in paths]


def usable_cores() -> int:
    """Cores this process may use: what the scheduler allows, within the container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def total_steps(config: Config, manifest: Manifest) -> int:
    """Steps of the whole run. Raises ``TrainingError`` if there is nothing to train on."""
    rows = manifest.rows("train")
    if rows == 0:
        raise TrainingError("the train split is empty: check the split section and the dead letters of preprocessing")
    steps = config.training.epochs * -(-rows // (config.training.batch_size * config.training.roles.nn_worker))
    return min(steps, config.training.max_steps or steps)
