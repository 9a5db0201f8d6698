"""A run on GKE, and a cloud for it on this machine whose time is that of the test."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from infra.gke.client import COMPUTE_ENDPOINT, GKE_ENDPOINT, Cloud, Pace
from infra.gke.fake import FakeCloud
from training.config_file import parse_config

NOW = datetime(2026, 12, 1, 18, 30, 20, tzinfo=UTC)
PROJECT = "some-project"


class Clock:
    """Time that passes by sleeping only."""

    def __init__(self):
        self.seconds = 0.0

    def sleep(self, seconds):
        self.seconds += seconds

    def __call__(self):
        return self.seconds

    def now(self):
        return NOW + timedelta(seconds=self.seconds)


def config_of(roles=None, pools=None, **cluster):
    """Four roles on three kinds of machines."""
    tree = {
        "name": "ads",
        "data": {"paths": ["/x.csv"], "format": "csv"},
        "schema": {"label": {"column": "y"}, "categorical": [{"name": "user"}]},
        "split": {"by": "hash"},
        "training": {"roles": {"data_loader": 2, "embedding_worker": 3, "nn_worker": 16, "parameter_server": 4, **(roles or {})}},
        "cluster": {
            "provider": "gke",
            "project": PROJECT,
            "zone": "us-central1-a",
            "bucket": "gs://some-bucket",
            "image": "europe-docker.pkg.dev/some-project/satrap/satrap@sha256:" + "0" * 64,
            "pools": {
                "data_loader": {"machine_type": "c2-standard-30", "spot": True},
                "embedding_worker": {"machine_type": "c2-standard-30", "compact": True, "tier_1": True},
                "nn_worker": {"machine_type": "a2-highgpu-8g", "processes_per_machine": 8, "compact": True, "local_ssds": 2},
                "parameter_server": {"machine_type": "m2-ultramem-416", "huge_pages_gib": 64},
                **(pools or {}),
            },
            **cluster,
        },
    }
    return parse_config(json.dumps(tree))


@pytest.fixture
def make_config():
    return config_of


@pytest.fixture(autouse=True)
def _no_real_cloud(monkeypatch):
    """Nothing listens there: what asks without being told where fails at once, and never reaches Google."""
    for name in (GKE_ENDPOINT, COMPUTE_ENDPOINT):
        monkeypatch.setenv(name, "127.0.0.1:9")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fake(clock):
    return FakeCloud(seconds=60.0, clock=clock)


@pytest.fixture
def cloud(fake, clock):
    """The real clients, connected to ``fake``."""
    pace = Pace(retry=0.001, patience=0.5, clock=clock, sleep=clock.sleep, now=clock.now)
    with fake.served() as environment, Cloud.connect(PROJECT, environment, pace) as connected:
        yield connected
