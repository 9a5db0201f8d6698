"""Threads are chosen by measurement where the configuration leaves them open, and by nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from training.config import Config
from training.dense.placement import ROUNDS, Placement, PlacementSearch
from training.events import EventLog, read_events
from training.in_process import in_process_trainer


def times_of(dense: dict[int, float], servers: dict[int, float]) -> Callable[[Placement], float]:
    """A machine on which a step takes so many seconds."""
    return lambda placement: dense[placement.dense_threads] + servers[placement.server_threads]


def searched(search: PlacementSearch, seconds: Callable[[Placement], float], *, hiccup_every: int = 0) -> int:
    """Do steps until the search is done; returns how many."""
    now, steps = 0.0, 0
    while not search.done:
        steps += 1
        now += seconds(search.current) + (10.0 if hiccup_every and steps % hiccup_every == 0 else 0.0)
        search.step(now)
    return steps


OPEN = ("training.mode=hybrid", "training.roles.parameter_server=1")
DENSE = {4: 0.10, 3: 0.08, 2: 0.12, 1: 0.3}
SERVERS = {1: 0.05, 2: 0.03, 4: 0.02}


def test_the_fastest_of_both_is_found(configured: Callable[..., Config]) -> None:
    search = PlacementSearch.of(configured(*OPEN).training, cores=4)
    assert search.current == Placement(4, 1)
    expected = search.steps_left
    assert searched(search, times_of(DENSE, SERVERS)) == expected
    assert search.current == Placement(3, 4)
    assert search.seconds_per_step[Placement(3, 2)] == pytest.approx(0.11)
    assert "3 and 2: 110.0 ms" in str(search)
    assert not search.step(1e9)
    assert search.current == Placement(3, 4)


def test_a_pause_of_the_machine_is_no_reason_to_choose(configured: Callable[..., Config]) -> None:
    search = PlacementSearch.of(configured(*OPEN).training, cores=4)
    searched(search, times_of(DENSE, SERVERS), hiccup_every=37)
    assert search.current == Placement(3, 4)


def test_an_interruption_counts_for_nothing(configured: Callable[..., Config]) -> None:
    search = PlacementSearch.of(configured(*OPEN).training, cores=4)
    now, seconds = 0.0, times_of(DENSE, SERVERS)
    for number in range(10_000):
        now += seconds(search.current)
        search.step(now)
        if number % 3 == 2:
            now += 60.0
            search.interrupted()
    assert search.current == Placement(3, 4)
    assert max(search.seconds_per_step.values()) < 1.0


def test_no_clear_gain_changes_nothing(configured: Callable[..., Config]) -> None:
    search = PlacementSearch.of(configured(*OPEN).training, cores=4)
    searched(search, times_of({4: 0.100, 3: 0.099, 2: 0.098, 1: 0.3}, {1: 0.001, 2: 0.0, 4: 0.0}))
    assert search.current == Placement(4, 1)


@pytest.mark.parametrize(
    ("settings", "cores", "current", "tried"),
    [
        (("training.dense_threads=3", "training.server_threads=2"), 8, Placement(3, 2), 0),
        (("training.dense_threads=3",), 4, Placement(3, 1), 3),
        (("training.server_threads=2",), 8, Placement(8, 2), 4),
        (("training.mode=sync", "training.roles.nn_worker=2", "training.roles.parameter_server=4"), 8, Placement(4, 2), 0),
        (("training.roles.nn_worker=2", "training.roles.parameter_server=8"), 2, Placement(1, 1), 0),
        ((), 1, Placement(1, 1), 0),
    ],
)
def test_only_what_is_open_is_tried(
    configured: Callable[..., Config], settings: tuple[str, ...], cores: int, current: Placement, tried: int
) -> None:
    search = PlacementSearch.of(configured(*OPEN, *settings).training, cores=cores)
    assert search.current == current
    assert search.done == (tried == 0)
    searched(search, lambda placement: 1.0 / placement.dense_threads)
    assert len(search.seconds_per_step) == tried


def test_ranks_decide_alike_although_they_measure_differently(configured: Callable[..., Config]) -> None:
    training = configured(*OPEN, "training.roles.nn_worker=2").training
    measured: list[list[float]] = [[], []]
    lone = [PlacementSearch.of(training, cores=8, agree=lambda s, mine=mine: mine.append(s) or s) for mine in measured]  # type: ignore[misc]
    for search, seconds in zip(lone, ({4: 1.0, 3: 0.5, 2: 1.1}, {4: 1.0, 3: 1.6, 2: 0.9}), strict=True):
        searched(search, lambda placement, seconds=seconds: seconds[placement.dense_threads])  # type: ignore[misc]
    assert lone[0].current != lone[1].current
    windows = 3 * ROUNDS
    means = [(a + b) / 2 for a, b in zip(measured[0][:windows], measured[1][:windows], strict=True)] + [1.0] * 100
    for seconds in ({4: 1.0, 3: 0.5, 2: 1.1}, {4: 1.0, 3: 1.6, 2: 0.9}):
        shared = iter(means)
        search = PlacementSearch.of(training, cores=8, agree=lambda _, shared=shared: next(shared))  # type: ignore[misc]
        searched(search, lambda placement, seconds=seconds: seconds[placement.dense_threads])  # type: ignore[misc]
        assert search.current.dense_threads == 4


def test_a_run_says_what_it_chose_and_uses_it(
    monkeypatch: pytest.MonkeyPatch, configured: Callable[..., Config], clicks_data: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr("training.dense.nn_worker.usable_cores", lambda: 3)
    monkeypatch.setattr("training.dense.placement.WINDOW_STEPS", 2)
    servers = []

    def watched(server):  # type: ignore[no-untyped-def]
        servers.append(server)
        return server

    config = configured(*OPEN, "training.epochs=40", "training.batch_size=64")
    with (
        EventLog(tmp_path / "events.jsonl") as events,
        in_process_trainer(config, clicks_data, tmp_path, events=events, tensorboard=True, wrap=watched) as rank,
    ):
        rank.run()
        assert rank.placement.done
        assert [table.threads for table in servers[0].tables] == [rank.placement.current.server_threads] * len(servers[0].tables)
        chosen = rank.placement.current
    notes = [event["message"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "note"]
    assert [note for note in notes if note.startswith(f"cores shared: {chosen.dense_threads} threads per nn_worker")]


def test_a_short_run_says_that_nothing_was_measured(configured: Callable[..., Config], clicks_data: Path, tmp_path: Path) -> None:
    config = configured(*OPEN, "training.max_steps=3")
    with EventLog(tmp_path / "events.jsonl") as events, in_process_trainer(config, clicks_data, tmp_path, events=events) as rank:
        if rank.placement.done:
            pytest.skip("one core leaves nothing to measure")
        rank.run()
    notes = [event["message"] for event in read_events(tmp_path / "events.jsonl") if event["kind"] == "note"]
    assert any("training.dense_threads" in note for note in notes)
