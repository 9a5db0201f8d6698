"""What a pod may ask for: less than what GKE leaves of its machine, by GKE's own formula."""

import pytest

from infra.gang import RoleSpec
from infra.kube.sizes import allocatable, process_size
from training.config import PoolConfig
from training.errors import ConfigError


def role(machine_type, **pool):
    return RoleSpec("parameter_server", 1, PoolConfig(machine_type=machine_type, **pool))


@pytest.mark.parametrize(
    ("machine_type", "cpus", "gib"),
    [
        # 6 % of the first CPU, 1 % of the second, 0.5 % of the next two, 0.25 % of the rest; 25 % of 4 GiB, 20 % of 4, 10 % of 8, 100 MiB.
        ("c2-standard-4", 4 - 0.08, 16 - 1.0 - 0.8 - 0.8 - 0.1),
        # and 6 % of the next 112 GiB.
        ("c2-standard-30", 30 - 0.08 - 0.065, 120 - 1.0 - 0.8 - 0.8 - 6.24 - 0.1),
        # and 2 % of the rest.
        ("m2-ultramem-416", 416 - 0.08 - 1.03, 11776 - 1.0 - 0.8 - 0.8 - 6.72 - 232.96 - 0.1),
    ],
)
def test_gke_keeps_its_share(machine_type, cpus, gib):
    left = allocatable(machine_type, where="here")
    assert (left.cpus, left.memory_gib) == (pytest.approx(cpus), pytest.approx(gib))


@pytest.mark.parametrize("machine_type", ["c2-standard-8", "c2-standard-30", "m2-ultramem-416", "a2-highgpu-8g"])
def test_a_pod_asks_for_a_little_less_than_what_is_left(machine_type):
    left, asked = allocatable(machine_type, where="here"), process_size(role(machine_type))
    assert 0.9 * left.memory_gib < asked.memory_gib < 0.97 * left.memory_gib
    assert left.cpus - 1.01 < asked.cpus < left.cpus


def test_processes_share_and_huge_pages_are_not_theirs():
    whole, eighth = process_size(role("a2-highgpu-8g")), process_size(role("a2-highgpu-8g", processes_per_machine=8))
    assert eighth.memory_gib == pytest.approx(whole.memory_gib / 8)
    assert process_size(role("a2-highgpu-8g", huge_pages_gib=100)).memory_gib == pytest.approx(whole.memory_gib - 97)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"parameter_server\.machine_type: c2-standard-4 leaves .* fewer processes_per_machine"):
        process_size(role("c2-standard-4", processes_per_machine=64))
    with pytest.raises(ConfigError, match=r"cluster\.pools\.parameter_server\.machine_type: 'c2-standard-31' is not in the catalogue"):
        process_size(role("c2-standard-31"))
