"""The estimate against the simulation of every message, and against what can be worked out by hand."""

from dataclasses import replace

import pytest

from benchmarks.scale.scenario import ours
from benchmarks.scale.simulation import simulate
from infra.plan.catalogue import machine_type
from infra.plan.costs import ASSUMPTIONS, Assumption
from infra.plan.plan import preset_config
from infra.plan.shape import shape_of
from infra.plan.throughput import throughput
from infra.plan.workload import Workload


def planned(*overrides, preset="hundred_trillion", machine=None):
    config = preset_config(preset, overrides)
    return throughput(Workload.of(config), shape_of(config, machine_type(machine, where="here") if machine else None))


def gang(dim, mode, *, ranks=8, servers=4, workers=8, batch=4096):
    """The same small gang for the simulation and for the plan."""
    parameters = 1e12
    roles = {"data_loader": 4, "embedding_worker": workers, "nn_worker": ranks, "parameter_server": servers}
    scenario = ours(parameters, dim=dim, mode=mode, servers=servers, workers=workers, loaders=4, ranks=ranks, batch=batch)
    overrides = [f"training.roles.{name}={count}" for name, count in roles.items()]
    overrides += [f"embedding.dim={dim}", f"embedding.capacity_rows={int(parameters / dim)}", f"training.mode={mode}"]
    return replace(scenario, measured=12), [*overrides, f"training.batch_size={batch}"]


@pytest.mark.parametrize(
    ("dim", "mode", "changed"),
    [
        (8, "hybrid", {}),
        (128, "hybrid", {}),
        (8, "sync", {}),
        (128, "sync", {}),
        (128, "async", {}),
        (64, "hybrid", {"ranks": 16}),
        (128, "hybrid", {"servers": 1}),
        (32, "hybrid", {"batch": 1024}),
    ],
)
def test_it_comes_within_a_sixth_of_the_simulation(dim, mode, changed):
    scenario, overrides = gang(dim, mode, **changed)
    assert planned(*overrides).samples_per_second == pytest.approx(simulate(scenario).samples_per_second, rel=1 / 6)


def test_it_names_the_same_bottleneck_as_the_simulation_where_servers_are_few():
    scenario, overrides = gang(128, "hybrid", ranks=32, servers=1, workers=32)
    assert simulate(scenario).bottleneck.startswith("server network")
    assert planned(*overrides).limit == "servers' network"


def test_the_step_is_as_long_as_its_longest_limit():
    found = planned()
    assert found.step_seconds == found.limits[0][1] == max(seconds for _, seconds in found.limits)
    assert found.samples_per_second == pytest.approx(64 * 4096 / found.step_seconds)


def test_modes_stand_in_the_order_of_what_they_wait_for():
    sync, hybrid, run_apart = (planned(f"training.mode={mode}").samples_per_second for mode in ("sync", "hybrid", "async"))
    assert sync < hybrid < run_apart


def test_more_staleness_never_slows_and_none_is_mode_sync():
    rates = [planned(f"training.max_staleness={bound}").samples_per_second for bound in (0, 1, 2, 4, 8)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(planned("training.mode=sync").samples_per_second, rel=0.2)


def test_where_only_the_gpu_takes_time_it_sets_the_pace(monkeypatch):
    for name, value in {"launch_seconds": 0.0, "jitter": 0.0, "bus_bytes_per_second": 1e18, "gpu_efficiency": 0.001}.items():
        monkeypatch.setitem(ASSUMPTIONS, name, Assumption(value, "", "for this test"))
    found = planned("training.roles.nn_worker=8")
    flops = 6.0 * sum(Workload.of(preset_config("hundred_trillion")).layers)
    assert found.limit == "nn workers"
    assert found.samples_per_second == pytest.approx(8 * 19.5e12 * 0.001 / flops, rel=0.01)


def test_one_machine_is_as_fast_as_was_measured_on_one():
    """docs/performance.md: the laptop preset's DLRM and tables on two cores did 42,009 samples/s with two dense threads."""
    found = planned(preset="laptop", machine="c2-standard-4")
    assert found.limit == "cores of the machine"
    assert found.samples_per_second == pytest.approx(42_009, rel=0.15)


def test_a_machine_with_a_gpu_is_faster_than_one_without():
    assert (
        planned(preset="one_gpu", machine="a2-highgpu-1g").samples_per_second
        > 3 * planned(preset="one_gpu", machine="c2-standard-16").samples_per_second
    )


def test_bytes_all_reduced_are_those_of_a_ring():
    weights = sum(Workload.of(preset_config("hundred_trillion")).layers)
    assert planned().reduce_bytes == pytest.approx(2 * 4 * weights * 7)
    assert planned("training.roles.nn_worker=8").reduce_bytes == 0.0
