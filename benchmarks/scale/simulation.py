"""A discrete-event simulation of the whole gang, message by message, with the queues and permits of the trainer.

The ways of a batch are those of ARCHITECTURE.md: a loader's thread per rank reads and puts ids at worker
``(step * ranks + rank) % workers``, which deduplicates at once; the rank takes a permit, asks the worker, the worker asks every server and
moves rows to records; dense step with buckets of gradients all-reduced while backward goes on; the gradient of the vectors goes back the
same way, the permit with the last server's acknowledgement.
Mode sync: one permit, and servers merge all ranks' updates of a step before any is acknowledged.
Mode async: no all-reduce but an averaging of the weights now and then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from benchmarks.scale.scenario import CPU, GPU, SERVER, Scenario
from benchmarks.scale.stations import Network, Station
from benchmarks.streams import NUM_DENSE

SIGN_BYTES, HALF_BYTES, FLOAT_BYTES = 8, 2, 4
ENVELOPE_BYTES = 100
"""Of a message without arrays."""
BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's default."""
NVLINK_BYTES_PER_SECOND = 300e9
"""Per GPU and direction: data sheet of the A100."""
COLLECTIVE_SECONDS = 20e-6
"""To start one collective operation; assumed, hidden behind backward but for the last bucket."""

Event = Any


@dataclass(frozen=True)
class Outcome:
    """What a simulated run was like, once the first steps were over."""

    samples_per_second: float
    use: dict[str, float]
    """Share of time that the busiest station of a kind worked. Work counts when it is taken on, so that 1 may mean a queue."""
    staleness: int
    """Largest number of a rank's unacknowledged earlier batches at a look-up."""
    step_seconds: float

    @property
    def bottleneck(self) -> str:
        """The kind of station that worked most."""
        return max(self.use, key=lambda kind: self.use[kind])


class _Server:
    """Interpreter lock, one lock per table (there is one table), cores, network."""

    def __init__(self) -> None:
        self.net, self.interpreter, self.table, self.cores = Network.of(SERVER.gbps), Station(), Station(), Station(SERVER.cores)
        self.waiting: dict[int, list[tuple[int, Callable[[], None]]]] = {}


class _Worker:
    def __init__(self) -> None:
        self.net, self.interpreter, self.cores = Network.of(CPU.gbps), Station(), Station(CPU.cores)


class _Loader(_Worker):
    pass


class _Rank:
    def __init__(self, environment: Any, scenario: Scenario, machine: _Machine) -> None:
        self.machine, self.interpreter, self.gpu = machine, Station(), Station()
        self.batches = [simpy.Store(environment, scenario.loader_depth) for _ in range(scenario.loaders)]
        self.permits = simpy.Container(environment, init=scenario.permits, capacity=scenario.permits)
        self.ready = simpy.Store(environment)
        self.unacknowledged = 0
        self.staleness = 0


class _Machine:
    """A GPU machine: its ranks share network and cores."""

    def __init__(self) -> None:
        self.net, self.cores = Network.of(GPU.gbps), Station(GPU.cores)


class Simulation:
    """One run; ``run`` once."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.env = simpy.Environment()
        self.servers = [_Server() for _ in range(scenario.servers)]
        self.workers = [_Worker() for _ in range(scenario.workers)]
        self.loaders = [_Loader() for _ in range(scenario.loaders)]
        self.machines = [_Machine() for _ in range(-(-scenario.ranks // scenario.ranks_per_machine))]
        self._reduce_on = [Network.of(GPU.gbps) if scenario.reduce_apart else machine.net for machine in self.machines]
        self.ranks = [_Rank(self.env, scenario, self.machines[r // scenario.ranks_per_machine]) for r in range(scenario.ranks)]
        self.steps = scenario.warm + scenario.measured
        self._rng = np.random.default_rng(scenario.seed)
        self._sigma = math.sqrt(math.log(1.0 + scenario.assumptions.jitter**2))
        self._dense: dict[int, list[tuple[float, float]]] = {}
        self._reduced: dict[int, Event] = {}
        self._finished: list[float] = []
        look_up, update = scenario.row_seconds()
        share = 1.0 / (1.0 if scenario.server_threads == 1 else scenario.server_threads * scenario.assumptions.thread_efficiency)
        self._look_up_seconds, self._update_seconds = look_up * share, update * share
        self._unique = scenario.unique
        self._part = self._unique / scenario.servers
        self._merged = self._part * scenario.ranks

    def run(self) -> Outcome:
        """Simulate all steps."""
        for r in range(self.s.ranks):
            for index in range(self.s.loaders):
                self.env.process(self._load(index, r))
            self.env.process(self._dispatch(r))
            self.env.process(self._train(r))
        done = self.env.process(self._watch())
        self.env.run(until=done)
        until, before = done.value
        end = self.env.now
        seconds = end - until
        records = self.s.measured * self.s.batch * self.s.ranks
        use = {kind: min(1.0, max(busy) / seconds) for kind, busy in self._since(before).items()}
        return Outcome(records / seconds, use, max(rank.staleness for rank in self.ranks), seconds / self.s.measured)

    def _watch(self) -> Iterator[Event]:
        """Ends when every rank has done all steps; its value: when they had warmed up, and how busy everything had been."""
        self._warm, self._over = self.env.event(), self.env.event()
        yield self._warm
        value = (self.env.now, self._busy())
        yield self._over
        return value

    def _busy(self) -> dict[str, list[float]]:
        kinds = {"server": self.servers, "worker": self.workers, "loader": self.loaders, "GPU machine": self.machines}
        busy: dict[str, list[float]] = {"GPU": [rank.gpu.busy_seconds for rank in self.ranks]}
        for name, members in kinds.items():
            busy[f"{name} network out"] = [m.net.out.station.busy_seconds for m in members]  # type: ignore[attr-defined]
            busy[f"{name} network in"] = [m.net.into.station.busy_seconds for m in members]  # type: ignore[attr-defined]
            busy[f"{name} cores"] = [m.cores.busy_seconds / m.cores.places for m in members]  # type: ignore[attr-defined]
            if name != "GPU machine":
                busy[f"{name} interpreter"] = [m.interpreter.busy_seconds for m in members]  # type: ignore[attr-defined]
        busy["rank interpreter"] = [rank.interpreter.busy_seconds for rank in self.ranks]
        busy["server table"] = [server.table.busy_seconds for server in self.servers]
        return busy

    def _since(self, before: dict[str, list[float]]) -> dict[str, list[float]]:
        return {kind: [b - a for a, b in zip(before[kind], now, strict=True)] for kind, now in self._busy().items()}

    def _jittered(self, seconds: float) -> float:
        return seconds * math.exp(self._sigma * self._rng.standard_normal() - self._sigma**2 / 2)

    def _at(self, time: float, call: Callable[[], None]) -> None:
        self.env.timeout(time - self.env.now).callbacks.append(lambda _: call())

    def _until(self, time: float) -> Event:
        return self.env.timeout(max(0.0, time - self.env.now))

    # ---- loaders

    def _load(self, index: int, r: int) -> Iterator[Event]:
        """The thread of a loader for one rank."""
        own, s, c, wire = self.loaders[index], self.s, self.s.costs, self.s.assumptions.wire_seconds
        ids_bytes, dense_bytes = s.ids * SIGN_BYTES + ENVELOPE_BYTES, s.batch * (NUM_DENSE + 1) * FLOAT_BYTES
        for step in range(index, self.steps, s.loaders):
            worker = self._worker_of(step, r)
            yield self._until(own.cores.take(self.env.now, self._jittered(s.batch * c.read_seconds)))
            yield self._until(own.interpreter.take(self.env.now, 4 * c.message_seconds))
            yield self._until(own.cores.take(self.env.now, ids_bytes * c.byte_seconds))
            yield self._until(own.net.out.take(self.env.now, ids_bytes) + wire)
            yield self._until(worker.net.into.take(self.env.now, ids_bytes))
            yield self._until(worker.interpreter.take(self.env.now, 2 * c.message_seconds))
            work = s.ids * c.dedup_seconds + ids_bytes * c.byte_seconds
            yield self._until(worker.cores.take(self.env.now, self._jittered(work)) + wire)
            yield self.ranks[r].batches[index].put(dense_bytes)

    def _worker_of(self, step: int, r: int) -> _Worker:
        return self.workers[(step * self.s.ranks + r) % self.s.workers]

    # ---- the feeder of a rank

    def _dispatch(self, r: int) -> Iterator[Event]:
        rank, s, c = self.ranks[r], self.s, self.s.costs
        for step in range(self.steps):
            loader = self.loaders[step % s.loaders]
            num_bytes = yield rank.batches[step % s.loaders].get()
            yield self._until(rank.interpreter.take(self.env.now, 2 * c.message_seconds) + s.assumptions.wire_seconds)
            yield self._until(loader.net.out.take(self.env.now, num_bytes) + s.assumptions.wire_seconds)
            yield self._until(rank.machine.net.into.take(self.env.now, num_bytes))
            yield rank.permits.get(1)
            rank.staleness = max(rank.staleness, rank.unacknowledged)
            rank.unacknowledged += 1
            yield rank.ready.put(self.env.process(self._look_up(step, r)))

    def _look_up(self, step: int, r: int) -> Iterator[Event]:
        rank, worker, s, c = self.ranks[r], self._worker_of(step, r), self.s, self.s.costs
        vectors = s.values * HALF_BYTES
        yield self._until(rank.interpreter.take(self.env.now, 2 * c.message_seconds) + s.assumptions.wire_seconds)
        yield self._until(worker.interpreter.take(self.env.now, 2 * c.message_seconds))
        if c.worker_id_seconds:
            yield self._until(worker.cores.take(self.env.now, self._jittered(s.ids * c.worker_id_seconds)))
        rows = self._part * s.dim * s.row_value_bytes
        yield self._fan_out(worker, step, self._part * SIGN_BYTES, rows, apply=False)
        unique_bytes = self._unique * s.dim * s.row_value_bytes
        work = s.values * c.expand_seconds + (unique_bytes + vectors) * c.byte_seconds
        yield self._until(worker.cores.take(self.env.now, self._jittered(work)))
        yield from worker.net.out.pieces(self.env, vectors)
        yield self._until(self.env.now + s.assumptions.wire_seconds)
        yield from rank.machine.net.into.pieces(self.env, vectors)
        host = vectors * c.byte_seconds + s.values * c.decode_seconds
        yield self._until(rank.machine.cores.take(self.env.now, self._jittered(host)))

    def _fan_out(self, worker: _Worker, step: int, request_bytes: float, reply_bytes: float, *, apply: bool) -> Event:
        """Ask all servers; the event of their last answer, received."""
        c, wire = self.s.costs, self.s.assumptions.wire_seconds
        done, left = self.env.event(), [len(self.servers)]

        def received() -> None:
            left[0] -= 1
            if not left[0]:
                done.succeed()

        def answered() -> None:
            passed = worker.net.into.take(self.env.now, reply_bytes + ENVELOPE_BYTES)
            self._at(worker.interpreter.take(passed, c.message_seconds), received)

        sent = self.env.now
        for server in self.servers:
            sent = worker.interpreter.take(sent, c.message_seconds)
            passed = worker.net.out.take(sent, request_bytes + ENVELOPE_BYTES)
            self._at(passed + wire, lambda server=server: self._serve(server, step, request_bytes, reply_bytes, answered, apply=apply))  # type: ignore[misc]
        return done

    def _serve(
        self, server: _Server, step: int, request_bytes: float, reply_bytes: float, answered: Callable[[], None], *, apply: bool
    ) -> None:
        """A request has arrived: reserve all it passes, in order."""
        s, c = self.s, self.s.costs
        values = self._part * s.dim
        passed = server.net.into.take(self.env.now, request_bytes + ENVELOPE_BYTES)
        handled = server.interpreter.take(passed, 2 * c.message_seconds)
        if apply:
            decoded = server.cores.take(handled, self._jittered(values * c.decode_seconds + request_bytes * c.byte_seconds))
            if s.mode == "sync":
                self._at(decoded, lambda: self._merge(server, step, answered))
                return
            ready = server.table.take(decoded, self._jittered(self._part * self._update_seconds))
        else:
            found = server.table.take(handled, self._jittered(self._part * self._look_up_seconds))
            ready = server.cores.take(found, self._jittered(values * c.encode_seconds + reply_bytes * c.byte_seconds))
        self._at(ready, lambda: self._reply(server, reply_bytes, answered))

    def _reply(self, server: _Server, reply_bytes: float, answered: Callable[[], None]) -> None:
        passed = server.net.out.take(self.env.now, reply_bytes + ENVELOPE_BYTES)
        self._at(passed + self.s.assumptions.wire_seconds, answered)

    def _merge(self, server: _Server, step: int, answered: Callable[[], None]) -> None:
        """Mode sync: the last rank's thread sums all ranks' gradients and updates once; then all are acknowledged."""
        waiting = server.waiting.setdefault(step, [])
        waiting.append((step, answered))
        if len(waiting) < self.s.ranks:
            return
        c = self.s.costs
        work = self._merged * (c.dedup_seconds + self.s.dim * c.sum_seconds + self._update_seconds)
        applied = server.table.take(self.env.now, self._jittered(work))
        for _, each in server.waiting.pop(step):
            self._at(applied, lambda each=each: self._reply(server, 0.0, each))  # type: ignore[misc]

    # ---- the rank

    def _train(self, r: int) -> Iterator[Event]:
        rank, s = self.ranks[r], self.s
        forward, backward = s.dense_seconds
        for step in range(self.steps):
            look_up = yield rank.ready.get()
            yield look_up
            host = s.assumptions.launch_seconds + s.batch * s.costs.rank_record_seconds
            yield self._until(rank.interpreter.take(self.env.now, self._jittered(host)))
            copy = s.values * FLOAT_BYTES / s.assumptions.bus_bytes_per_second
            yield self._until(rank.gpu.take(self.env.now, copy + self._jittered(forward)))
            seconds = self._jittered(backward)
            if s.mode != "async":
                reduced = self._join(step, seconds)
            yield self._until(rank.gpu.take(self.env.now, seconds))
            if s.mode != "async":
                yield reduced
            # Gradients of the vectors leave once it is known that every rank's are finite.
            yield self._until(rank.gpu.take(self.env.now, copy))
            self.env.process(self._update(step, r))
            if s.mode == "async" and (step + 1) % s.averaging_period == 0:
                yield self._join(step, 0.0)
            self._finish()

    def _finish(self) -> None:
        self._finished.append(self.env.now)
        if len(self._finished) == self.s.warm * self.s.ranks:
            self._warm.succeed()
        if len(self._finished) == self.steps * self.s.ranks:
            self._over.succeed()

    def _join(self, step: int, backward: float) -> Event:
        """This rank's backward begins now; the event of the step's last reduced bucket."""
        begun = self._dense.setdefault(step, [])
        begun.append((self.env.now, backward))
        event = self._reduced.setdefault(step, self.env.event())
        if len(begun) == self.s.ranks:
            self.env.process(self._all_reduce(step))
        return event

    def _all_reduce(self, step: int) -> Iterator[Event]:
        """Bucket after bucket, each once every rank has it: within a machine over NVLink, between machines around a ring."""
        s, begun = self.s, self._dense.pop(step)
        machines = len(self.machines)
        for share, num_bytes in _buckets(s.layers):
            ready = max(start + share * seconds for start, seconds in begun)
            yield self._until(ready)
            inside = 2 * num_bytes * (1 - 1 / s.ranks_per_machine) / NVLINK_BYTES_PER_SECOND
            yield self._until(self.env.now + COLLECTIVE_SECONDS + inside)
            if machines > 1:
                ring = 2 * num_bytes * (machines - 1) / machines
                hops = 2 * (machines - 1) * s.assumptions.wire_seconds
                directions = [link for net in self._reduce_on for link in (net.out, net.into)]
                yield self.env.all_of([self.env.process(link.pieces(self.env, ring)) for link in directions])
                yield self._until(self.env.now + hops)
        self._reduced.pop(step).succeed()

    def _update(self, step: int, r: int) -> Iterator[Event]:
        rank, worker, s, c = self.ranks[r], self._worker_of(step, r), self.s, self.s.costs
        vectors = s.values * HALF_BYTES
        host = s.values * c.encode_seconds + vectors * c.byte_seconds
        yield self._until(rank.machine.cores.take(self.env.now, self._jittered(host)))
        yield self._until(rank.interpreter.take(self.env.now, 2 * c.message_seconds))
        yield from rank.machine.net.out.pieces(self.env, vectors)
        yield self._until(self.env.now + s.assumptions.wire_seconds)
        yield from worker.net.into.pieces(self.env, vectors)
        yield self._until(worker.interpreter.take(self.env.now, 2 * c.message_seconds))
        gradients = self._unique * s.dim
        work = s.values * c.sum_seconds + gradients * c.encode_seconds + (vectors + gradients * s.row_value_bytes) * c.byte_seconds
        if c.worker_id_seconds:
            work += s.ids * c.worker_id_seconds
        yield self._until(worker.cores.take(self.env.now, self._jittered(work)))
        yield self._fan_out(worker, step, self._part * (SIGN_BYTES + s.dim * s.row_value_bytes), 0.0, apply=True)
        yield self._until(self.env.now + s.assumptions.wire_seconds)
        rank.unacknowledged -= 1
        yield rank.permits.put(1)


def _buckets(layers: list[int]) -> list[tuple[float, float]]:
    """(share of backward that must be done, bytes) of the buckets of gradients, last layer first."""
    total, done, held, made = sum(layers), 0, 0.0, []
    for weights in reversed(layers):
        done += weights
        held += weights * FLOAT_BYTES
        if held >= BUCKET_BYTES:
            made.append((done / total, held))
            held = 0.0
    if held:
        made.append((1.0, held))
    return made


def simulate(scenario: Scenario) -> Outcome:
    """One run."""
    return Simulation(scenario).run()
