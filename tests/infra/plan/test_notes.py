import json

import pytest

from infra.plan.plan import machine_for, make_plan, preset_config


def notes(preset, *overrides, machine=None):
    config = preset_config(preset, overrides)
    plan = make_plan(config, machine=machine_for(config, machine, preset=preset))
    assert json.loads(plan.to_json())["notes"] == list(plan.notes)
    return "\n".join(plan.notes)


@pytest.mark.parametrize(
    ("preset", "change", "told"),
    [
        ("hundred_trillion", "cluster.zone=europe-west1-b", "cluster.zone is europe-west1-b"),
        ("gke_small", "cluster.pools.parameter_server.machine_type=x4-960-12t-metal", "network of x4-960-12t-metal is not published"),
        ("gke_small", "cluster.provider=vertex", "Vertex AI adds a fee"),
        ("gke_small", "cluster.pools.parameter_server={machine_type: m3-ultramem-128, tier_1: true}", "Tier_1 networking is not counted"),
        ("gke_small", "cluster.pools.parameter_server.machine_type=m4-ultramem-112", "different regions: europe-west4, us-central1"),
        ("hundred_trillion", "cluster.pools.data_loader={machine_type: c2-standard-30, spot: true}", "price on demand"),
        ("gke_small", "cluster.pools.nn_worker.machine_type=a2-highgpu-1g", "computed from its data sheet"),
    ],
)
def test_what_a_plan_leaves_out_is_said_where_it_applies_and_only_there(preset, change, told):
    assert told in notes(preset, change)
    assert told not in notes("laptop", machine="c2-standard-8")


def test_zones_are_doubted_only_if_the_configured_one_is_not_among_them():
    assert "cluster.zone is" not in notes("hundred_trillion")


def test_more_servers_on_a_machine_are_advised_as_long_as_they_would_help():
    told = "checkpoints are faster with several smaller servers"
    several = ["cluster.pools.parameter_server.processes_per_machine=4", "training.roles.parameter_server=120"]
    assert told in notes("hundred_trillion")
    assert told not in notes("hundred_trillion", *several)
