"""The pods of a role as data: one container per role process, one pod to a machine.

A container runs ``satrap role NAME``; the job, with the token of its connections, comes as a Secret; the bucket is the directory
``/gcs/<bucket>``. The processes of a pod share its address and differ by port.
"""

from __future__ import annotations

import math
from typing import Any

from infra.gang import BASE_PORT, Gang, RoleSpec
from infra.gke.machines import gpus_of
from infra.kube.sizes import process_size
from training.config import Config
from training.pod import POD_IP, PROCESS, PROCESSES, RESTARTS

Manifest = dict[str, Any]
NAMESPACE = "satrap"
SERVICE_ACCOUNT = "satrap"
"""Kubernetes service account of the pods; Workload Identity gives it roles/storage.objectUser on the bucket."""
JOB_FILE = "/etc/satrap/job.json"
RUN_FOLDER = "/run/satrap"
"""A pod's own directory: signs of life, and where the ranks of one pod meet."""
GPU = "nvidia.com/gpu"
USER = 10001
"""User and group of the image, as its Dockerfile makes them."""
GRACE_SECONDS = 60
"""From SIGTERM to SIGKILL."""
PROBE_SECONDS = 10
SILENT_MINUTES = 2
"""A process that leaves no sign of life for so long is stopped: it hangs."""
_GIB = 1024
_SHM_SHARE = 0.125
"""Of a pod's memory that ``/dev/shm`` may take: ranks of one machine exchange gradients through it."""


def pod_template(role: RoleSpec, gang: Gang, config: Config) -> Manifest:
    """The template of a role's pods."""
    tolerations = [{"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in role.node_labels.items()]
    if gpus_of(role.pool.machine_type):
        tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    if role.pool.spot:
        tolerations.append({"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"})
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "serviceAccountName": SERVICE_ACCOUNT,
        "nodeSelector": role.node_labels,
        "tolerations": tolerations,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(role, process, config) for process in range(role.pool.processes_per_machine)],
        "volumes": _volumes(role, gang, config),
    }
    return {
        "metadata": {
            "labels": {**gang.labels, **role.node_labels},
            "annotations": {"gke-gcsfuse/volumes": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"},
        },
        "spec": spec,
    }


def requests_of(role: RoleSpec) -> dict[str, str]:
    """What one container of the role asks for, as quantities of Kubernetes."""
    size = process_size(role)
    memory = int(size.memory_gib * _GIB)
    amount = {"cpu": f"{int(size.cpus * 1000)}m", "memory": f"{memory // _GIB}Gi" if memory >= 16 * _GIB else f"{memory}Mi"}
    gpus = gpus_of(role.pool.machine_type)
    return {**amount, GPU: str(gpus.count // role.pool.processes_per_machine)} if gpus else amount


def _container(role: RoleSpec, process: int, config: Config) -> Manifest:
    requests = requests_of(role)
    container: Manifest = {
        "name": f"{role.short}-{process}",
        "image": config.cluster.image,
        "command": ["satrap", "role", role.role],
        "args": ["--job", JOB_FILE],
        "env": _environment(role, process),
        "resources": {"requests": requests, "limits": {name: amount for name, amount in requests.items() if name != "cpu"}},
        "volumeMounts": [
            {"name": "job", "mountPath": "/etc/satrap", "readOnly": True},
            {"name": "run", "mountPath": RUN_FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - a volume of the pod's own
            {"name": "bucket", "mountPath": bucket_folder(config)},
        ],
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        # The last line of standard error is what a role says of its end.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "livenessProbe": {
            "exec": {"command": ["sh", "-c", f'test -z "$(find {RUN_FOLDER} -name "alive-*" -mmin +{SILENT_MINUTES})"']},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
        },
    }
    if role.role == "nn_worker":
        container["volumeMounts"].append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - a volume of the pod's own
    else:
        port = BASE_PORT + process
        container["ports"] = [{"name": f"role-{process}", "containerPort": port}]
        patience = math.ceil(start_seconds(config) / PROBE_SECONDS)
        for probe, failures in (("startupProbe", patience), ("readinessProbe", 3)):
            container[probe] = {"tcpSocket": {"port": port}, "periodSeconds": PROBE_SECONDS, "failureThreshold": failures}
    return container


def _environment(role: RoleSpec, process: int) -> list[Manifest]:
    fixed = {PROCESSES: str(role.pool.processes_per_machine), PROCESS: str(process), "HOME": "/tmp", "PYTHONUNBUFFERED": "1"}  # noqa: S108
    fixed |= {"NUMBA_CACHE_DIR": "/tmp/numba", "TORCHINDUCTOR_CACHE_DIR": "/tmp/inductor"}  # noqa: S108
    if role.role == "nn_worker":
        fixed["GLOO_SOCKET_IFNAME"] = "eth0"
    else:
        fixed |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    # Kubernetes itself adds JOB_COMPLETION_INDEX to the pods of an Indexed Job.
    fields = {
        POD_IP: "status.podIP",
        RESTARTS: "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
    }
    return [
        *({"name": name, "value": value} for name, value in fixed.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
    ]


def _volumes(role: RoleSpec, gang: Gang, config: Config) -> list[Manifest]:
    assert config.cluster.bucket
    # Other machines must see what one has written at once, and a checkpoint is renamed when it is whole.
    options = f"implicit-dirs,uid={USER},gid={USER},metadata-cache:ttl-secs:0,metadata-cache:negative-ttl-secs:0,rename-dir-limit=1000000"
    attributes = {"bucketName": config.cluster.bucket.removeprefix("gs://"), "mountOptions": options}
    volumes: list[Manifest] = [
        {"name": "job", "secret": {"secretName": gang.run, "defaultMode": 0o440}},
        {"name": "run", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "bucket", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}},
    ]
    if role.role == "nn_worker":
        size = int(process_size(role).memory_gib * role.pool.processes_per_machine * _SHM_SHARE * _GIB)
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}})
    return volumes


def bucket_folder(config: Config) -> str:
    """Directory of the bucket in every pod, and in every step of a pipeline: ``/gcs/<bucket>``."""
    assert config.cluster.bucket
    return f"/gcs/{config.cluster.bucket.removeprefix('gs://')}"


def start_seconds(config: Config) -> float:
    """How long pods wait for one another: machines come up and images are pulled minutes apart, then a role may take its own time."""
    return config.cluster.provision_timeout_minutes * 60 + config.training.start_timeout_seconds
