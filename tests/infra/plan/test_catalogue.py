import pytest

from infra.gke.machines import FAMILIES, family_of
from infra.plan.catalogue import GIB, GPU_FLOPS, ZONES, catalogue, machine_type, memory_machines, zones_of
from training.errors import ConfigError


@pytest.mark.parametrize("name", catalogue())
def test_every_machine_type_is_of_a_known_family_and_its_gpus_have_a_data_sheet(name):
    machine = machine_type(name, where="here")
    assert name.split("-")[0] in FAMILIES
    assert (machine.gpu_flops is not None) == (family_of(name).kind == "gpu")
    assert machine.gpus is None or machine.gpus.type in GPU_FLOPS
    assert (machine.usd_per_hour is None) == (machine.region == "") == (machine.price_date == "") == (machine.source == "")
    assert machine.tier_1_gbps is None or (family_of(name).tier_1 and machine.tier_1_gbps > machine.egress_gbps)


def test_the_price_of_a_smaller_machine_is_its_share_of_the_larger():
    shares = [machine for machine in catalogue().values() if machine.source.startswith("share of ")]
    assert len(shares) > 5
    for machine in shares:
        whole = catalogue()[machine.source.removeprefix("share of ")]
        part = machine.vcpus / whole.vcpus
        assert machine.memory_gib / whole.memory_gib == pytest.approx(part)
        assert machine.usd_per_hour == pytest.approx(part * whole.usd_per_hour, abs=1e-4)


def test_gke_keeps_a_falling_share_of_a_nodes_memory():
    # 25 % of 4, 20 % of 4, 10 % of 8, 6 % of 112 and 2 % of the remaining 11,648 GiB, and 0.1 GiB for eviction.
    kept = 1.0 + 0.8 + 0.8 + 6.72 + 232.96 + 0.1
    assert machine_type("m2-ultramem-416", where="here").allocatable_bytes == pytest.approx((11776 - kept) * GIB)
    assert machine_type("c2-standard-4", where="here").allocatable_bytes == pytest.approx((16 - 1.0 - 0.8 - 0.8 - 0.1) * GIB)


def test_an_unknown_machine_type_is_refused_with_those_like_it():
    with pytest.raises(ConfigError, match=r"here: 'm2-ultramem-417' is not in the catalogue.*did you mean m2-ultramem-416"):
        machine_type("m2-ultramem-417", where="here")
    with pytest.raises(ConfigError, match="the catalogue has a2-highgpu-1g"):
        machine_type("zzz", where="here")


def test_memory_machines_are_roomy_have_a_price_and_no_gpus():
    names = {machine.name for machine in memory_machines()}
    assert {"m2-ultramem-416", "m3-ultramem-128", "c4-highmem-32"} <= names
    assert not names & {"a2-highgpu-8g", "c2-standard-30", "x4-960-12t-metal"}


def test_zones_are_those_that_had_all_machine_types():
    (types,) = ZONES
    assert "us-central1-a" in zones_of(set(types))
    assert zones_of({"m2-ultramem-416"}) == zones_of(set(types))
    assert zones_of({"m2-ultramem-416", "n2-standard-2"}) == ()
