"""What is asked of a cluster: golden files to be reviewed as diffs, schemas that know every field, and what follows from the gang."""

import json
import os
from pathlib import Path

import pytest
import yaml

from infra.gang import BASE_PORT
from infra.kube.jobset import DIGEST, jobset, pod_job
from infra.kube.manifests import manifests
from infra.kube.schema import problems_of
from infra.plan.plan import preset_config
from training.errors import ConfigError
from training.job import Job

GOLDEN = Path(__file__).parent / "golden"
CASES = {
    "gke_small": ("gke_small", []),
    "gke_small_queued": ("gke_small", ["cluster.profile=queued", "cluster.max_run_hours=48"]),
    "hundred_trillion": ("hundred_trillion", []),
}
"""A preset and what is set otherwise."""


class Plain(yaml.SafeDumper):
    """Writes out what occurs twice."""

    def ignore_aliases(self, data):
        return True


@pytest.fixture
def made(make_config, make_job, make_gang):
    def make(**changes):
        config = make_config(**changes)
        return manifests(make_gang(config), config, make_job(config))

    return make


def named(documents, kind):
    return [document for document in documents if document["kind"] == kind]


@pytest.fixture(params=CASES)
def case(request, make_job, make_gang):
    """Name and manifests of a case."""
    config = preset_config(*CASES[request.param])
    places = {"data_dir": "/gcs/my-bucket/data/k1", "output_dir": "/gcs/my-bucket/runs/r1/train"}
    return request.param, manifests(make_gang(config), config, make_job(config, **places))


def test_the_manifests_are_the_golden_ones(case):
    """Review their diffs. Where the whole configuration is in it, only its place stands there."""
    name, documents = case
    named(documents, "Secret")[0]["stringData"]["job.json"] = "<job>"
    named(documents, "JobSet")[0]["metadata"]["annotations"][DIGEST] = "<digest>"
    text = yaml.dump_all(documents, Dumper=Plain, sort_keys=False, width=140)
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "if the change is wanted: set UPDATE_GOLDEN=1 and look at the diff"


def test_every_manifest_passes_its_schema(case):
    assert [problem for document in case[1] for problem in problems_of(document)] == []


@pytest.mark.parametrize(
    ("kind", "path", "value", "told"),
    [
        ("JobSet", ("spec", "suspended"), True, "'suspended' was unexpected"),
        ("JobSet", ("spec", "failurePolicy", "restartStrategy"), "Sometimes", "'Sometimes' is not one of"),
        ("JobSet", ("spec", "replicatedJobs", 0, "template", "spec", "paralelism"), 3, "replicatedJobs[ps].template"),
        ("JobSet", ("spec", "replicatedJobs", 1, "template", "spec", "template", "spec", "containers", 0, "comand"), [], "[ew].template"),
        ("ClusterQueue", ("spec", "resourceGroups", 0, "flavors", 0, "resources", 0, "nominalQuota"), "4 cores", "nominalQuota"),
        ("ResourceFlavor", ("spec", "nodeLabels"), {}, "ResourceFlavor.spec"),
        ("PodDisruptionBudget", ("spec", "minavailable"), 1, "PodDisruptionBudget.spec"),
    ],
)
def test_a_planted_fault_is_found_where_it_is(made, kind, path, value, told):
    (document, *_) = named(made(), kind)
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    (problem, *_) = problems_of(document)
    assert told in problem


def test_every_role_has_its_pods_on_its_machines_and_its_ports(made):
    (found,) = named(made(), "JobSet")
    roles = {job["name"]: job["template"]["spec"] for job in found["spec"]["replicatedJobs"]}
    assert {name: (spec["parallelism"], spec["completions"]) for name, spec in roles.items()} == {
        "ps": (3, 3),
        "ew": (2, 2),
        "dl": (1, 1),
        "nn": (1, 1),
    }
    pods = {name: spec["template"]["spec"] for name, spec in roles.items()}
    assert [container["name"] for container in pods["nn"]["containers"]] == [f"nn-{i}" for i in range(8)]
    assert pods["ps"]["containers"][0]["ports"] == [{"name": "role-0", "containerPort": BASE_PORT}]
    assert pods["ps"]["nodeSelector"] == {"satrap-role": "parameter_server"}
    assert {t["key"] for t in pods["dl"]["tolerations"]} == {"satrap-role", "cloud.google.com/gke-spot"}
    assert {t["key"] for t in pods["nn"]["tolerations"]} == {"satrap-role", "nvidia.com/gpu"}


def test_the_quota_is_what_the_gang_asks_for(made):
    (queue,) = named(made(), "ClusterQueue")
    (found,) = named(made(), "JobSet")
    (group,) = queue["spec"]["resourceGroups"]
    for flavor, job in zip(group["flavors"], found["spec"]["replicatedJobs"], strict=True):
        assert flavor["name"] == job["name"]
        spec = job["template"]["spec"]
        asked = [container["resources"]["requests"] for container in spec["template"]["spec"]["containers"]] * spec["completions"]
        quota = {resource["name"]: resource["nominalQuota"] for resource in flavor["resources"]}
        for name in group["coveredResources"]:
            assert amount(quota[name]) == pytest.approx(sum(amount(each.get(name, "0")) for each in asked)), (flavor["name"], name)


def amount(quantity):
    for unit, factor in (("Gi", 2**30), ("Mi", 2**20), ("m", 1e-3), ("", 1)):
        if quantity.endswith(unit):
            return float(quantity.removesuffix(unit)) * factor
    raise AssertionError(quantity)


def test_pods_get_addresses_by_name_and_the_token_as_a_secret(made):
    documents = made()
    (secret,) = named(documents, "Secret")
    job = Job.model_validate_json(secret["stringData"]["job.json"])
    assert job.peers["parameter_server"] == [f"satrap-20261201-abc-ps-0-{i}.satrap-20261201-abc:7700" for i in range(3)]
    assert job.peers["nn_worker"] == [f"satrap-20261201-abc-nn-0-0.satrap-20261201-abc:{7700 + i}" for i in range(8)]
    assert (job.config.training.transport, job.config.training.start_timeout_seconds) == ("tcp", 3720.0)
    others = json.dumps([document for document in documents if document is not secret])
    assert job.token not in others


def test_what_pods_cannot_see_is_refused(make_config, make_job, make_gang):
    config = make_config()
    job = make_job(config, data_dir="/home/ada/data", resume="/gcs/another-bucket/c")
    with pytest.raises(ConfigError) as refused:
        pod_job(job, make_gang(config), config)
    assert [line.split(":")[0] for line in refused.value.problems] == ["data", "checkpoint"]
    assert "must lie below /gcs/some-bucket" in str(refused.value)


def test_processes_must_fill_their_machines(make_config, make_gang):
    config = make_config(roles={"nn_worker": 12})
    with pytest.raises(ConfigError, match=r"nn_worker\.processes_per_machine: 8 does not divide the 12 processes"):
        jobset(make_gang(config), config)
