"""How one machine's cores are shared between the dense network and the parameter servers: measured in a run's first steps.

Only what the configuration leaves open is searched. First the dense network's threads are tried with the servers' at one, then the
servers' with the best of those; every candidate gets ``ROUNDS`` windows of steps, in turn, and its median counts. More than one
candidate is tried in modes hybrid and async alone: in mode sync the dense network and the servers never work at the same time, so both
get all cores, and a run can be repeated bit by bit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from training.config_training import TrainingConfig

ROUNDS = 3
WINDOW_STEPS = 8
"""Timed steps of a window, beside those that use up what was looked up before it began."""
MAX_SETTLING_STEPS = 8
GAIN = 1.03
"""A candidate replaces one before it only if it is so much faster: two windows of the same placement differ by about 2 %."""
MAX_SERVER_THREADS = 16
"""Beyond it the number must be set by hand: no machine with room for more was measured."""


@dataclass(frozen=True)
class Placement:
    """Threads of every process of the two roles that need the most."""

    dense_threads: int
    """Of torch in an nn_worker."""
    server_threads: int
    """Of a parameter_server for one large look-up or update."""


Change = Mapping[str, int]
"""Fields of a ``Placement``."""


class PlacementSearch:
    """Finds the fastest placement from the times at which steps end. It starts nothing and sets nothing: its owner does."""

    def __init__(self, start: Placement, stages: Sequence[Sequence[Change]], *, settling: int, agree: Callable[[float], float]) -> None:
        """Every stage lists changes of the best placement so far; the first of them changes nothing.

        ``settling`` steps of a window are not timed. ``agree`` makes one number of those of all ranks, so that all decide alike.
        """
        self.current = start
        self.seconds_per_step: dict[Placement, float] = {}
        """Of every placement tried: the median over its windows."""
        self._best = start
        self._stages = [stage for stage in stages if len(stage) > 1]
        self._window_steps = settling + WINDOW_STEPS
        self._agree = agree
        self._windows: dict[Placement, list[float]] = {}
        self._turns: list[Placement] = []
        self._last: float | None = None
        self._begin()

    @classmethod
    def of(cls, training: TrainingConfig, *, cores: int, agree: Callable[[float], float] = lambda seconds: seconds) -> PlacementSearch:
        """The search for a run on a machine with ``cores`` usable cores, which all its ranks and servers share."""
        own = max(1, cores // training.roles.nn_worker)
        most = max(1, min(MAX_SERVER_THREADS, cores // training.roles.parameter_server))
        measured = training.mode != "sync"
        start = Placement(training.dense_threads or own, training.server_threads or (1 if measured else most))
        dense = {own, max(1, (cores - 1) // training.roles.nn_worker), max(1, 3 * own // 4), max(1, own // 2)}
        servers = {most, *(1 << power for power in range(most.bit_length()))}
        stages = []
        if measured and training.dense_threads is None:
            stages.append([{"dense_threads": number} for number in sorted(dense, reverse=True)])
        if measured and training.server_threads is None:
            stages.append([{"server_threads": number} for number in sorted(servers)])
        return cls(start, stages, settling=min(training.staleness_bound + 1, MAX_SETTLING_STEPS), agree=agree)

    @property
    def done(self) -> bool:
        """Whether ``current`` is final."""
        return not self._turns

    @property
    def steps_left(self) -> int:
        """Steps until it is done, at most, if none is interrupted."""
        turns = len(self._turns) + ROUNDS * sum(len(stage) for stage in self._stages)
        return turns * self._window_steps + 1

    def step(self, now: float) -> bool:
        """A step ended at ``now`` seconds; True if ``current`` changed or became final. Every rank must end the same steps."""
        if self.done:
            return False
        before, self._last = self._last, now
        if before is None:
            return False
        self._times.append(now - before)
        if len(self._times) < self._window_steps:
            return False
        timed = self._times[-WINDOW_STEPS:]
        # Without the slowest step: the machine may have been busy with something else.
        self._end_window(self._agree((sum(timed) - max(timed)) / (WINDOW_STEPS - 1)))
        return True

    def interrupted(self) -> None:
        """What comes now is no step (an evaluation, a checkpoint): its time does not count."""
        self._last = None

    def __str__(self) -> str:
        tried = ", ".join(f"{p.dense_threads} and {p.server_threads}: {1e3 * s:.1f} ms" for p, s in self.seconds_per_step.items())
        return f"cores shared: {self.current.dense_threads} threads per nn_worker, {self.current.server_threads} per parameter_server" + (
            f" (a step with {tried})" if tried else ""
        )

    def _begin(self) -> None:
        """Begin the next stage, or end with the best."""
        self._stage = [replace(self._best, **change) for change in self._stages.pop(0)] if self._stages else []
        self._windows.clear()
        self._turns = self._stage * ROUNDS
        self._times: list[float] = []
        self.current = self._turns[0] if self._turns else self._best

    def _end_window(self, seconds: float) -> None:
        placement = self._turns.pop(0)
        windows = self._windows.setdefault(placement, [])
        windows.append(seconds)
        self.seconds_per_step[placement] = statistics.median(windows)
        if self._turns:
            self._times, self.current = [], self._turns[0]
            return
        for candidate in self._stage:
            if self.seconds_per_step[candidate] * GAIN < self.seconds_per_step[self._best]:
                self._best = candidate
        self._begin()
