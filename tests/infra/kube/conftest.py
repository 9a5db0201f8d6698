"""A gang of seven pods on four kinds of machines, and the job that its launcher wrote."""

import json
from datetime import UTC, datetime

import pytest

from infra.gang import gang_of
from training.config_file import parse_config
from training.job import Job

NOW = datetime(2026, 12, 1, 18, 30, 20, tzinfo=UTC)
IMAGE = "europe-docker.pkg.dev/some-project/satrap/satrap@sha256:" + "0" * 64


def config_of(roles=None, pools=None, **cluster):
    tree = {
        "name": "ads",
        "data": {"paths": ["/x.csv"], "format": "csv"},
        "schema": {"label": {"column": "y"}, "categorical": [{"name": "user"}]},
        "split": {"by": "hash"},
        "training": {"roles": {"data_loader": 1, "embedding_worker": 2, "nn_worker": 8, "parameter_server": 3, **(roles or {})}},
        "cluster": {
            "provider": "gke",
            "project": "some-project",
            "zone": "us-central1-a",
            "bucket": "gs://some-bucket",
            "image": IMAGE,
            "pools": {
                "data_loader": {"machine_type": "c2-standard-30", "spot": True},
                "embedding_worker": {"machine_type": "c2-standard-30"},
                "nn_worker": {"machine_type": "a2-highgpu-8g", "processes_per_machine": 8},
                "parameter_server": {"machine_type": "m2-ultramem-416"},
                **(pools or {}),
            },
            **cluster,
        },
    }
    return parse_config(json.dumps(tree))


def job_of(config, **changes):
    job = Job(
        config_json=config.to_json(),
        data_dir="/gcs/some-bucket/data/k1",
        output_dir="/gcs/some-bucket/runs/r1/train",
        token="0123456789abcdef0123456789abcdef",
        rendezvous="/nowhere",
        events="/gcs/some-bucket/runs/r1/events.jsonl",
    )
    return job.model_copy(update=changes)


@pytest.fixture
def make_config():
    return config_of


@pytest.fixture
def make_job():
    return job_of


@pytest.fixture
def make_gang():
    return lambda config: gang_of(config, "20261201-abc", now=NOW)
