"""The queue of a run's cluster: Kueue admits the gang when there is room for all of it, and not before.

Each role has a flavor, that is the nodes of its pool. The quota is exactly what the gang asks for. Where the machines stand already
(profiles on_demand and reserved) a Topology makes Kueue count the nodes that are really there; with profile queued an AdmissionCheck has
DWS hand out the GPUs first, and the other pools grow after admission.
"""

from __future__ import annotations

import re

from infra.gang import Gang, RoleSpec
from infra.kube.pods import GPU, NAMESPACE, Manifest, requests_of
from training.config import Config

KUEUE = "kueue.x-k8s.io/v1beta2"
QUEUE = "satrap"
"""Name of the queue, and of everything around it: a run's cluster has one."""


def queue(gang: Gang, config: Config) -> list[Manifest]:
    """Flavors, the queue and what else it takes, in the order in which they refer to one another."""
    queued = config.cluster.profile == "queued"
    before = _provisioning(gang) if queued else [_topology(gang)]
    flavors = [_flavor(role, gang, topology=not queued) for role in gang.roles]
    return [*before, *flavors, _cluster_queue(gang, queued=queued), _local_queue(gang)]


def _kueue(kind: str, name: str, gang: Gang, spec: Manifest) -> Manifest:
    return {"apiVersion": KUEUE, "kind": kind, "metadata": {"name": name, "labels": gang.labels}, "spec": spec}


def _topology(gang: Gang) -> Manifest:
    levels = [{"nodeLabel": "topology.kubernetes.io/zone"}, {"nodeLabel": "kubernetes.io/hostname"}]
    return _kueue("Topology", QUEUE, gang, {"levels": levels})


def _flavor(role: RoleSpec, gang: Gang, *, topology: bool) -> Manifest:
    taints = [{"key": key, "value": value, "effect": "NoSchedule"} for key, value in role.node_labels.items()]
    spec: Manifest = {"nodeLabels": role.node_labels, "nodeTaints": taints}
    return _kueue("ResourceFlavor", role.short, gang, {**spec, "topologyName": QUEUE} if topology else spec)


def _cluster_queue(gang: Gang, *, queued: bool) -> Manifest:
    covered = ["cpu", "memory", *([GPU] if any(GPU in requests_of(role) for role in gang.roles) else [])]
    flavors = [
        {"name": role.short, "resources": [{"name": name, "nominalQuota": _total(role, name)} for name in covered]} for role in gang.roles
    ]
    spec: Manifest = {
        "queueingStrategy": "StrictFIFO",
        "namespaceSelector": {},
        "preemption": {"withinClusterQueue": "Never"},
        "resourceGroups": [{"coveredResources": covered, "flavors": flavors}],
    }
    if queued:
        checks = [{"name": QUEUE, "onFlavors": [gang.role("nn_worker").short]}]
        spec["admissionChecksStrategy"] = {"admissionChecks": checks}
    return _kueue("ClusterQueue", QUEUE, gang, spec)


def _local_queue(gang: Gang) -> Manifest:
    manifest = _kueue("LocalQueue", QUEUE, gang, {"clusterQueue": QUEUE})
    manifest["metadata"]["namespace"] = NAMESPACE
    return manifest


def _provisioning(gang: Gang) -> list[Manifest]:
    """Only the GPU pods go into the request: GKE takes one pod set, and DWS has no other machines of a gang."""
    name = "autoscaling.gke.io/provisioning-request"
    request = {
        "provisioningClassName": "queued-provisioning.gke.io",
        "managedResources": [GPU],
        "podSetMergePolicy": "IdenticalWorkloadSchedulingRequirements",
        "podSetUpdates": {"nodeSelector": [{"key": name, "valueFromProvisioningClassDetail": "ResizeRequestName"}]},
        "retryStrategy": {"backoffLimitCount": 2, "backoffBaseSeconds": 60, "backoffMaxSeconds": 1800},
    }
    parameters = {"apiGroup": KUEUE.partition("/")[0], "kind": "ProvisioningRequestConfig", "name": QUEUE}
    check = {"controllerName": "kueue.x-k8s.io/provisioning-request", "parameters": parameters}
    return [_kueue("ProvisioningRequestConfig", QUEUE, gang, request), _kueue("AdmissionCheck", QUEUE, gang, check)]


def _total(role: RoleSpec, resource: str) -> str:
    """What all pods of a role ask for together."""
    match = re.fullmatch(r"(\d+)([a-zA-Z]*)", requests_of(role).get(resource, "0"))
    assert match is not None
    return f"{int(match[1]) * role.processes}{match[2]}"
