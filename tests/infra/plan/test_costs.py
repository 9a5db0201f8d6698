import json
from pathlib import Path

import pytest

from benchmarks.scale.measure import CONSTANTS
from benchmarks.scale.scenario import Assumptions, ours
from benchmarks.scale.simulation import NVLINK_BYTES_PER_SECOND
from infra.plan import costs
from infra.plan.costs import ASSUMPTIONS, assumed, line_through

MEASURED = Path(costs.__file__).with_name("measured.json")


def test_the_measured_costs_are_those_on_file_in_benchmarks():
    assert json.loads(MEASURED.read_text()) == json.loads(CONSTANTS.read_text()), f"copy {CONSTANTS} to {MEASURED}"


@pytest.mark.parametrize("dim", [8, 16, 40, 128])
def test_they_are_read_as_the_simulation_reads_them(dim):
    theirs = ours(parameters=dim * 30 * 2.6e10, dim=dim)
    assert costs.costs().row_seconds(dim, 2.6e10) == pytest.approx(theirs.row_seconds())
    own = costs.costs()
    for name in ("dedup", "expand", "sum", "encode", "decode", "message", "byte", "read"):
        assert getattr(own, f"{name}_seconds") == getattr(theirs.costs, f"{name}_seconds"), name


def test_what_both_assume_is_the_same():
    theirs = Assumptions()
    shared = set(ASSUMPTIONS) & set(vars(theirs))
    assert shared >= {"wire_seconds", "gpu_efficiency", "bus_bytes_per_second", "launch_seconds", "thread_efficiency", "jitter"}
    assert {name: assumed(name) for name in shared} == {name: getattr(theirs, name) for name in shared}
    assert assumed("nvlink_bytes_per_second") == NVLINK_BYTES_PER_SECOND


def test_rows_of_widths_that_were_not_measured_cost_more_the_wider():
    seconds = [sum(costs.costs().row_seconds(dim, 1e9)) for dim in (1, 4, 8, 32, 256, 1024)]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


def test_a_line_goes_on_beyond_its_ends_but_not_below_zero():
    points = [(1.0, 2.0), (2.0, 3.0), (4.0, 7.0)]
    assert [line_through(points, at) for at in (0.0, 1.0, 1.5, 3.0, 4.0, 6.0, -5.0)] == [1.0, 2.0, 2.5, 5.0, 7.0, 11.0, 0.0]


def test_every_assumption_names_its_source():
    assert all(a.source.split(":")[0].split()[0] in ("assumed", "measured", "data", "chosen") for a in ASSUMPTIONS.values())
