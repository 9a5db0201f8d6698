"""Contender: the trainer with all its role processes, stopped between slices of steps."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

from benchmarks.contenders import CALM, ROOT, ContenderError
from training import launcher
from training.config_file import parse_config
from training.job import Job

_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Measurement:
    """What the role processes are told; see ``benchmarks.roles``."""

    prefill: int
    delay_seconds: float = 0.0
    dense_seconds: float = 0.0


class OwnTrainer:
    """A context manager: the processes run while it is open."""

    def __init__(self, name: str, settings: dict[str, Any], data_dir: Path, measurement: Measurement) -> None:
        self.name = name
        self._settings = settings
        self._data_dir = data_dir
        self._measurement = measurement
        self._stack = ExitStack()

    def __enter__(self) -> OwnTrainer:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def ask(self, what: str, *, warm: int, steps: int) -> dict[str, Any]:
        """``train``: some steps to get going, then ``steps`` timed ones. CPU seconds per role are of all of them."""
        assert what == "train"
        before = self._cpu()
        self._lines.write(json.dumps([warm, steps]) + "\n")
        self._lines.flush()
        line = self._lines.readline()
        if not line:
            raise ContenderError(f"{self.name} ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        answer["cpu"] = {role: (used - before[role]) / (warm + steps) for role, used in self._cpu().items()}
        answer["samples_per_second"] = steps * self._settings["training"]["batch_size"] / answer["seconds"]
        answer["wire_bytes_so_far"] = answer.pop("wire_bytes")
        return answer

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        self._logs = folder / "logs"
        control = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        control.bind(str(folder / "control"))
        control.listen(1)
        control.settimeout(120.0)
        told = {**self._measurement.__dict__, "control": str(folder / "control")}
        job = Job(
            config_json=parse_config(json.dumps(self._settings)).to_json(),
            data_dir=str(self._data_dir),
            output_dir=str(folder),
            token=secrets.token_hex(16),
            rendezvous=str(folder),
            events=str(folder / "events.jsonl"),
        )
        popen = subprocess.Popen

        def spawn(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            command = ["benchmarks.roles" if word == "training.roles" else word for word in command]
            environment = {**(options.pop("env", None) or os.environ), "SATRAP_BENCH": json.dumps(told), "PYTHONPATH": str(ROOT), **CALM}
            return popen(command, env=environment, cwd=ROOT, **options)

        with mock.patch.object(launcher.subprocess, "Popen", spawn):
            group = self._stack.enter_context(launcher.RoleGroup(job, logs=self._logs))
        self._processes = group._processes
        try:
            client, _ = control.accept()
        except TimeoutError:
            raise ContenderError(f"{self.name} did not start: {self._last_words()}") from None
        self._stack.callback(client.close)
        self._lines = client.makefile("rw")
        self._stack.callback(self._lines.close)

    def _cpu(self) -> dict[str, float]:
        """Seconds every role's processes have used."""
        used: dict[str, float] = {}
        for (role, _), process in self._processes.items():
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            used[role] = used.get(role, 0.0) + (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS
        return used

    def _last_words(self) -> str:
        texts = [(path.name, path.read_text(errors="replace").strip()) for path in sorted(self._logs.glob("*.log"))]
        return " | ".join(f"{name}: {text[-300:]}" for name, text in texts if text) or "(nothing in the logs)"
