"""The gang as one JobSet, with what stands beside it: the job's Secret and the budget that keeps its pods where they are.

What a role survives decides the policies. The run is done when all ranks are. No role survives the loss of another, so whatever is lost,
the gang starts again as a whole, from its newest checkpoint, once every old pod is gone; but a role that fails by itself (exit status 1,
or 2 for a configuration) would fail again and ends the run.
"""

from __future__ import annotations

import hashlib
from typing import Any

from infra.gang import Gang, RoleSpec
from infra.kube.pods import JOB_FILE, NAMESPACE, RUN_FOLDER, Manifest, bucket_folder, pod_template, start_seconds
from infra.kube.queue import QUEUE
from training.config import Config
from training.errors import ConfigError
from training.job import ROLES, Job

JOBSET = "jobset.x-k8s.io/v1alpha2"
MAX_RESTARTS = 3
MAX_SPOT_RESTARTS = 30
"""Where loaders run on machines that are taken away as a matter of course."""
DIGEST = "satrap/config-digest"
"""Annotation that tells whether a JobSet that is there already is of the configuration that is to be launched."""
_OWN_FAULTS = [1, 2]
EVENTS = "/dev/stdout"
"""Where roles in pods write their events: into the log, which is what comes back from a pod."""


def pod_job(job: Job, gang: Gang, config: Config) -> Job:
    """A job as the pods of a gang need it: TCP between machines, addresses by name, events into the log.

    Raises ``ConfigError`` if the data or the output lie where the pods cannot see them.
    """
    bucket = bucket_folder(config)
    problems = [
        f"{what}: {folder} is not in the bucket that all machines see; it must lie below {bucket} (cluster.bucket)"
        for what, folder in (("data", job.data_dir), ("output.root", job.output_dir), ("checkpoint", job.resume or job.warm_start))
        if folder and not folder.startswith(f"{bucket}/")
    ]
    if problems:
        raise ConfigError(problems)
    network = {"transport": "tcp", "tcp_host": "0.0.0.0", "start_timeout_seconds": start_seconds(config)}  # noqa: S104 - pods reach one another, with the token
    training = config.training.model_copy(update=network)
    peers = {role: [f"{gang.host(role, i)}:{gang.port(role, i)}" for i in range(gang.role(role).processes)] for role in ROLES}
    return job.model_copy(
        update={
            "config_json": config.model_copy(update={"training": training}).to_json(),
            "rendezvous": RUN_FOLDER,
            "events": EVENTS,
            "peers": peers,
        }
    )


def job_secret(job: Job, gang: Gang) -> Manifest:
    """The job description: it holds the token that every connection between roles shows first."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": gang.run, "namespace": NAMESPACE, "labels": gang.labels},
        "immutable": True,
        "type": "Opaque",
        "stringData": {JOB_FILE.rpartition("/")[2]: job.model_dump_json()},
    }


def jobset(gang: Gang, config: Config) -> Manifest:
    """The four roles. It is made suspended; Kueue lets it start when there is room for all of it.

    Raises ``ConfigError`` for processes that do not fill their machines.
    """
    problems = [
        f"cluster.pools.{role.role}.processes_per_machine: {role.pool.processes_per_machine} does not divide the {role.processes} "
        f"processes of training.roles.{role.role}; all pods of a role are alike"
        for role in gang.roles
        if role.processes % role.pool.processes_per_machine
    ]
    if problems:
        raise ConfigError(problems)
    ranks = gang.role("nn_worker")
    spec: dict[str, Any] = {
        "suspend": True,
        "network": {"enableDNSHostnames": True, "subdomain": gang.run, "publishNotReadyAddresses": True},
        "coordinator": {"replicatedJob": ranks.short, "jobIndex": 0, "podIndex": 0},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [ranks.short]},
        "failurePolicy": {
            "maxRestarts": MAX_SPOT_RESTARTS if any(role.pool.spot for role in gang.roles) else MAX_RESTARTS,
            # New pods must not connect to old ones that are on their way out.
            "restartStrategy": "BlockingRecreate",
            "rules": [{"name": "own-fault", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"]}],
        },
        "replicatedJobs": [
            {"name": role.short, "replicas": 1, "template": {"metadata": {"labels": gang.labels}, "spec": _job(role, gang, config)}}
            for role in gang.roles
        ],
    }
    digest = hashlib.sha256(config.to_json().encode()).hexdigest()[:16]
    metadata = {
        "name": gang.run,
        "namespace": NAMESPACE,
        "labels": {**gang.labels, "kueue.x-k8s.io/queue-name": QUEUE},
        "annotations": {DIGEST: digest, **_run_time(config)},
    }
    return {"apiVersion": JOBSET, "kind": "JobSet", "metadata": metadata, "spec": spec}


def disruption_budget(gang: Gang) -> Manifest:
    """No pod may be evicted. By number: the controller of pods of a Job has no scale that ``maxUnavailable`` could be a part of."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": gang.run, "namespace": NAMESPACE, "labels": gang.labels},
        "spec": {
            "minAvailable": sum(role.pods for role in gang.roles),
            "selector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": gang.run}},
        },
    }


def _job(role: RoleSpec, gang: Gang, config: Config) -> Manifest:
    return {
        "completionMode": "Indexed",
        "parallelism": role.pods,
        "completions": role.pods,
        "backoffLimit": 0,
        "activeDeadlineSeconds": int(config.cluster.max_run_hours * 3600),
        "podFailurePolicy": {
            "rules": [
                # First, because whatever a pod says while its machine is taken away is no fault of its own.
                {"action": "Count", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": _OWN_FAULTS}},
            ]
        },
        "template": pod_template(role, gang, config),
    }


def _run_time(config: Config) -> dict[str, str]:
    """How long machines are asked of DWS for."""
    if config.cluster.profile != "queued":
        return {}
    return {"provreq.kueue.x-k8s.io/maxRunDurationSeconds": str(int(config.cluster.max_run_hours * 3600))}
