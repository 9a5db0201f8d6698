import pytest

from infra.plan.alternatives import alternatives_of
from infra.plan.catalogue import catalogue, machine_type, memory_machines
from infra.plan.estimate import estimate
from infra.plan.plan import make_plan, preset_config
from infra.plan.shape import MAX_SERVERS, Pool, allowed, shape_of
from infra.plan.workload import Workload
from training.errors import ConfigError


def estimated(*overrides, preset="gke_small"):
    config = preset_config(preset, overrides)
    return estimate(Workload.of(config), shape_of(config, machine_type("c2-standard-30", where="here")))


def test_machines_come_cheapest_first_and_each_is_what_its_configuration_would_be():
    found = alternatives_of(estimated("embedding.capacity_rows=20000000000")).machines
    assert {one.machine for one in found} == {machine.name for machine in memory_machines()}
    prices = [one.usd_per_hour for one in found]
    assert prices == sorted(prices)
    for one in found[:4]:
        settings = [f"cluster.pools.parameter_server.machine_type={one.machine}", f"training.roles.parameter_server={one.servers}"]
        same = estimated("embedding.capacity_rows=20000000000", *settings)
        assert same.fits
        assert (same.shape.usd_per_hour, same.checkpoint_seconds) == pytest.approx((one.usd_per_hour, one.checkpoint_seconds))
        assert same.throughput.samples_per_second == one.samples_per_second


def test_machines_are_in_order_of_their_price_even_if_that_of_other_roles_is_unknown():
    found = alternatives_of(
        estimated("cluster.pools.nn_worker={machine_type: a3-ultragpu-8g, processes_per_machine: 8}", "embedding.dim=128")
    ).machines
    assert all(one.usd_per_hour is None for one in found)
    prices = [one.machines * catalogue()[one.machine].usd_per_hour for one in found]
    assert prices == pytest.approx(sorted(prices))


def test_a_machine_that_no_legal_number_of_suffices_is_left_out():
    found = alternatives_of(estimated("embedding.capacity_rows=2000000000000", "training.roles.parameter_server=40"))
    assert found.machines
    assert "c4-highmem-16" not in {one.machine for one in found.machines}
    assert all(one.servers <= MAX_SERVERS for one in found.machines)


def test_the_largest_number_of_servers_is_that_of_the_configuration():
    assert preset_config("gke_small", [f"training.roles.parameter_server={MAX_SERVERS}"])
    with pytest.raises(ConfigError):
        preset_config("gke_small", [f"training.roles.parameter_server={MAX_SERVERS + 1}"])
    machine = machine_type("c4-highmem-16", where="here")
    assert [allowed(Pool("parameter_server", count, each, machine)) for count, each in ((1000, 1), (1001, 1), (1024, 2), (1025, 2))] == [
        *(True, False),
        *(True, False),
    ]


def test_other_widths_hold_the_same_parameters():
    config = preset_config("gke_small")
    parameters = config.embedding.dim * config.embedding.capacity_rows
    for one in alternatives_of(estimated()).widths:
        rows = one.total_bytes / one.bytes_per_row
        assert rows * one.dim == pytest.approx(parameters, rel=1e-6)


def test_rows_of_several_widths_have_no_table_of_widths():
    found = alternatives_of(estimated("model.name=dnn", "embedding.slots={c1: {dim: 8}}"))
    assert found.widths == ()
    assert {one.dim for one in found.formats} == {None}


def test_the_sweep_over_servers_begins_where_the_tables_fit_and_contains_the_configured_number():
    found = estimated("embedding.capacity_rows=20000000000", "training.roles.parameter_server=40")
    sweep = alternatives_of(found).servers
    counts = [one.servers for one in sweep]
    assert counts == sorted(set(counts))
    assert 40 in counts
    assert estimated("embedding.capacity_rows=20000000000", f"training.roles.parameter_server={counts[0]}").fits
    assert not estimated("embedding.capacity_rows=20000000000", f"training.roles.parameter_server={counts[0] - 1}").fits
    assert all(one.fits_as_is for one in sweep)


def test_one_machine_has_formats_and_widths_alone():
    config = preset_config("one_gpu")
    found = make_plan(config, machine=machine_type("a2-highgpu-1g", where="here")).alternatives
    assert found.formats
    assert found.widths
    assert found.machines == found.servers == ()
    assert {one.optimizer for one in found.formats if one.row_dtype == "float32" and one.possible} == {"sgd", "rowwise_adagrad"}
