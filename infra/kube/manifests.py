"""Everything that is asked of a cluster for a run, in the order in which it is applied."""

from __future__ import annotations

from infra.gang import Gang
from infra.kube.jobset import disruption_budget, job_secret, jobset, pod_job
from infra.kube.pods import NAMESPACE, SERVICE_ACCOUNT, Manifest
from infra.kube.queue import queue
from training.config import Config
from training.job import Job


def surroundings(gang: Gang, config: Config) -> list[Manifest]:
    """What the JobSet needs to be there: namespace, service account, queue, disruption budget."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": gang.labels}}
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": SERVICE_ACCOUNT, "namespace": NAMESPACE, "labels": gang.labels},
    }
    return [namespace, account, *queue(gang, config), disruption_budget(gang)]


def manifests(gang: Gang, config: Config, job: Job) -> list[Manifest]:
    """All of it, the JobSet last. ``job`` is as the launcher wrote it for this machine.

    Raises ``ConfigError`` for machines that cannot hold their pods and for data that pods cannot see.
    """
    return [*surroundings(gang, config), job_secret(pod_job(job, gang, config), gang), jobset(gang, config)]
