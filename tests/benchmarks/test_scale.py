"""The simulation of the gang against what can be worked out by hand, and the real tables at capacity in a small form."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.scale import id_space, measure, published, report, study
from benchmarks.scale.scenario import Assumptions, Costs, Scenario, grown, measured_costs, ours
from benchmarks.scale.simulation import _buckets, simulate
from benchmarks.scale.stations import Link, Station

FREE = Costs(0.0, 0.0, ((1e6, 0.0), (1e8, 0.0)), ((1e6, 0.0), (1e8, 0.0)), *[0.0] * 8)
STEADY = Assumptions(wire_seconds=0.0, launch_seconds=0.0, jitter=0.0, bus_bytes_per_second=1e18)


def small(**changed):
    settings = {"servers": 3, "workers": 4, "loaders": 2, "ranks": 4, "ranks_per_machine": 2, "batch": 256, "dim": 8, "measured": 8}
    return Scenario(**{"parameters": 1e12, "costs": FREE, "assumptions": STEADY, **settings, **changed})


def test_a_station_works_in_order_of_arrival_on_all_its_places():
    one, two = Station(), Station(2)
    assert [one.take(0.0, 1.0), one.take(0.5, 1.0), one.take(5.0, 1.0)] == [1.0, 2.0, 6.0]
    assert [two.take(0.0, 1.0), two.take(0.0, 2.0), two.take(0.0, 1.0)] == [1.0, 2.0, 2.0]
    assert (one.busy_seconds, two.busy_seconds) == (3.0, 4.0)
    assert Link(100.0).take(1.0, 50.0) == 1.5


def test_gradients_are_reduced_in_buckets_of_25_mib_last_layer_first():
    assert _buckets([1 << 20, 7 << 20, 1 << 20]) == [(8 / 9, 32 << 20), (1.0, 4 << 20)]


def test_extra_cost_of_a_large_table_is_read_between_points_and_carried_on_beyond_them():
    points = ((1e6, 0.0), (1e7, 2.0), (1e8, 12.0))
    assert [grown(points, rows, 1.0) for rows in (1e3, 1e6, 1e7, 1e8, 1e9)] == pytest.approx([0.0, 0.0, 2.0, 12.0, 22.0])
    assert grown(points, 10**7.5, 1.0) == pytest.approx(7.0)
    assert grown(points, 1e12, 0.0) == 12.0


def test_twelve_million_weights_are_what_the_published_network_has_at_width_8():
    assert sum(published.published().layers) == pytest.approx(12e6, rel=0.01)


def test_where_only_the_gpu_takes_time_every_mode_goes_at_its_speed():
    slow_gpu = replace(STEADY, gpu_flops=1e11)
    for mode in ("hybrid", "async"):
        scenario = small(mode=mode, assumptions=slow_gpu)
        outcome = simulate(scenario)
        assert outcome.samples_per_second == pytest.approx(4 * 256 / sum(scenario.dense_seconds), rel=0.12)
        assert outcome.bottleneck == "GPU"


def test_sync_pays_for_the_way_to_the_servers_and_hybrid_hides_it():
    # Look-up and update each pass four wires: to the worker, to the servers, and back.
    # Fetching a batch passes two, one batch after another.
    base = small(ranks_per_machine=4, max_staleness=16, assumptions=replace(STEADY, wire_seconds=0.02, gpu_flops=1e14))
    step = {mode: simulate(replace(base, mode=mode)).step_seconds for mode in ("sync", "hybrid")}
    assert step["sync"] == pytest.approx(8 * 0.02, rel=0.1)
    assert step["hybrid"] == pytest.approx(2 * 0.02, rel=0.1)
    assert simulate(replace(base, max_staleness=1)).step_seconds == pytest.approx(8 * 0.02 / 2, rel=0.1)


def test_vectors_and_all_reduce_hinder_each_other_only_on_one_network():
    busy = small(dim=128, batch=4096, servers=16, workers=32, loaders=8, assumptions=replace(STEADY, gpu_flops=1e15))
    shared, apart = simulate(busy), simulate(replace(busy, reduce_apart=True))
    assert apart.samples_per_second > 1.1 * shared.samples_per_second
    assert apart.use["GPU machine network out"] < shared.use["GPU machine network out"]


def test_a_slow_server_is_found_and_halves_throughput_when_it_is_twice_as_slow():
    slow = [simulate(small(costs=replace(FREE, update_seconds=seconds), server_threads=1)) for seconds in (1e-5, 2e-5)]
    assert [outcome.bottleneck for outcome in slow] == ["server table"] * 2
    assert slow[0].samples_per_second / slow[1].samples_per_second == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(("mode", "bound", "most"), [("sync", 4, 0), ("hybrid", 1, 1), ("hybrid", 4, 4)])
def test_staleness_reaches_its_bound_and_never_passes_it(mode, bound, most):
    scenario = small(mode=mode, max_staleness=bound, assumptions=replace(STEADY, wire_seconds=0.01))
    assert simulate(scenario).staleness == most


def test_a_seed_repeats_a_run_and_another_does_not():
    jittery = small(assumptions=replace(STEADY, jitter=0.2, gpu_flops=1e12))
    assert simulate(jittery) == simulate(jittery)
    assert simulate(jittery) != simulate(replace(jittery, seed=1))


def test_costs_on_file_are_read_at_any_width_between_those_measured():
    at = {dim: measured_costs(dim).look_up_seconds for dim in (8, 16, 32, 64)}
    assert at[32] == pytest.approx(at[16] + (at[64] - at[16]) / 3)
    with pytest.raises(ValueError, match="dim 4: measured from 8 to 128"):
        measured_costs(4)


def test_the_calibration_on_file_meets_the_published_modes():
    calibrated = json.loads(published.CALIBRATED.read_text())
    for mode, rate in calibrated["wanted"].items():
        assert calibrated["rates"][mode] == pytest.approx(rate, rel=0.01)
    assert published.rates(calibrated["values"], measured=6)["async"] == pytest.approx(calibrated["rates"]["async"], rel=0.03)


def test_ids_of_a_batch_repeat_less_in_a_larger_id_space():
    shares = [measure.unique_share(ids, 512, 1.05) for ids in (10**3, 10**6, 10**12)]
    assert shares == sorted(shares)
    assert measure.unique_share(10**12, 512, 0.0) == 1.0


def test_a_full_table_evicts_a_row_for_every_stranger_and_keeps_most_regulars():
    run = id_space.measure(20_000, turnovers=3.0, batch=1_000)
    assert run["rows"] == run["places"]
    assert run["evicted"] == run["inserted"] > 50_000
    assert run["hits"] + run["inserted"] == run["signs"]
    assert run["present"] > 0.99
    assert 0.9 < run["intact"] <= run["present"]


def test_a_regular_that_lost_its_row_counts_as_lost():
    class Zeros:
        def lookup(self, signs, out, *, insert):
            out[:] = 0.0
            return type("Counts", (), {"hits": len(signs)})

    trained = np.array([0, 0, 1, 2])
    survival = id_space._survival(Zeros(), np.array([1, 2, 3, 4], np.uint64), trained, np.empty((4, 16), np.float32))
    assert survival["intact"] == 0.0


def test_constants_are_measured_for_everything_the_simulation_asks(tmp_path):
    constants = measure.measure(rows=(2_000, 4_000), dims=(8, 16), repetitions=2)
    costs = measured_costs(8, measure.save(constants, tmp_path / "constants.json"))
    assert costs.look_up_seconds > 0
    assert costs.message_seconds > 0
    assert costs.rank_record_seconds == costs.worker_id_seconds == 0.0


def test_a_missing_part_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run python -m benchmarks\.scale simulate --only sizes"):
        report.write(tmp_path, tmp_path)


def test_sensitivity_is_the_change_against_the_run_as_it_is():
    found = {f"as is/1/{mode}": {"median": rate} for mode, rate in zip(study.MODES, (1.0, 2.0, 4.0), strict=True)}
    found |= {f"jitter/2/{mode}": {"median": rate} for mode, rate in zip(study.MODES, (1.0, 1.0, 4.0), strict=True)}
    assert report._responses(found) == {"jitter": {"2": (-0.5, -0.5, -0.5)}}


def test_ours_has_nothing_fitted():
    costs = ours().costs
    assert costs.rank_record_seconds == costs.worker_id_seconds == 0.0
