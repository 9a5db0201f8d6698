"""Asking Google Cloud: clients of GKE and Compute Engine, retries of what passes by itself, and errors in words.

``SATRAP_GKE_ENDPOINT`` and ``SATRAP_COMPUTE_ENDPOINT`` (``127.0.0.1:PORT``; set both or none) lead to ``infra.gke.fake`` without
credentials or encryption; without them Google's own endpoints are asked with the application default credentials.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import google.auth
import grpc
import requests
from google.api_core import exceptions
from google.api_core.retry import Retry
from google.auth.credentials import AnonymousCredentials
from google.auth.exceptions import GoogleAuthError
from google.cloud import container_v1 as gke
from google.cloud.container_v1.services.cluster_manager.transports import ClusterManagerGrpcTransport

from training.errors import ClusterError, ConfigError

GKE_ENDPOINT, COMPUTE_ENDPOINT = "SATRAP_GKE_ENDPOINT", "SATRAP_COMPUTE_ENDPOINT"
_ADDRESS = re.compile(r"[A-Za-z0-9.-]+:\d{1,5}")
_PASSING = (
    exceptions.ServiceUnavailable,
    exceptions.GatewayTimeout,  # DEADLINE_EXCEEDED of one call
    exceptions.InternalServerError,
    exceptions.BadGateway,
    exceptions.Aborted,
    requests.ConnectionError,
    requests.Timeout,
)
_RATE = "RATE_LIMIT_EXCEEDED"
"""Reason of a RESOURCE_EXHAUSTED that asks to come again; any other is about machines."""


@dataclass(frozen=True)
class Pace:
    """How long things may take, in seconds, and whose clock tells."""

    poll: float = 5.0
    """Between two looks at an operation."""
    call: float = 60.0
    """One call."""
    retry: float = 1.0
    """Before the first repetition of a call; doubles, with jitter, up to 16 times that."""
    patience: float = 300.0
    """One call with its repetitions."""
    fill: float = 300.0
    """From a pool that is said to run until all its nodes do, and from a cluster that is gone until its machines are."""
    release: float = 3600.0
    """Deleting everything of a run, with waiting for operations that are in its way."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    now: Callable[[], datetime] = field(default=lambda: datetime.now(UTC))

    def deadline(self, seconds: float) -> Deadline:
        """A moment so many seconds from now."""
        return Deadline(self, self.clock() + seconds)


@dataclass(frozen=True)
class Deadline:
    """A moment at which waiting ends."""

    pace: Pace
    end: float

    @property
    def over(self) -> bool:
        """Whether the moment has passed."""
        return self.end <= self.pace.clock()

    def wait(self) -> bool:
        """Sleep until the next look; false if the time is over."""
        left = self.end - self.pace.clock()
        if left <= 0:
            return False
        self.pace.sleep(min(self.pace.poll, left))
        return True


class Cloud:
    """The clients of one project. A context manager."""

    def __init__(self, project: str, pace: Pace, channel: grpc.Channel | None, transports: Mapping[str, Any]) -> None:
        self.project = project
        self.pace = pace
        self._channel = channel
        self._transports = transports
        self._clients: dict[type, Any] = {}

    @classmethod
    def connect(cls, project: str, environment: Mapping[str, str], pace: Pace | None = None) -> Cloud:
        """Clients by the endpoints of the environment, see above. Nothing is asked yet, except credentials where they are needed.

        Raises ``ConfigError`` for endpoints that are none, ``ClusterError`` without credentials.
        """
        addresses = [environment.get(name, "") for name in (GKE_ENDPOINT, COMPUTE_ENDPOINT)]
        if not any(addresses):
            try:
                credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
            except GoogleAuthError as error:
                raise ClusterError(f"project {project}: {_hint(error)}") from None
            return cls(project, pace or Pace(), None, {"credentials": credentials})
        for name, address in zip((GKE_ENDPOINT, COMPUTE_ENDPOINT), addresses, strict=True):
            if not _ADDRESS.fullmatch(address):
                raise ConfigError(
                    [f"{name}={address!r}: expected HOST:PORT, for both endpoints or for none; python -m infra.gke.fake prints them"]
                )
        channel = grpc.insecure_channel(addresses[0], options=[("grpc.enable_http_proxy", 0)])
        rest = {"host": f"http://{addresses[1]}", "url_scheme": "http", "credentials": AnonymousCredentials()}  # type: ignore[no-untyped-call]
        return cls(project, pace or Pace(), channel, rest)

    def __enter__(self) -> Cloud:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for client in self._clients.values():
            client.transport.close()
        if self._channel is not None:
            self._channel.close()

    @property
    def clusters(self) -> gke.ClusterManagerClient:
        """Clusters, node pools and operations."""
        if gke.ClusterManagerClient not in self._clients:
            own = ClusterManagerGrpcTransport(channel=self._channel) if self._channel else None
            self._clients[gke.ClusterManagerClient] = (
                gke.ClusterManagerClient(transport=own) if own else gke.ClusterManagerClient(**self._transports)
            )
        client: gke.ClusterManagerClient = self._clients[gke.ClusterManagerClient]
        return client

    def compute(self, client: type) -> Any:
        """A client of ``compute_v1``, such as ``RegionsClient``."""
        if client not in self._clients:
            transport = client.get_transport_class("rest")  # type: ignore[attr-defined]
            own = transport(**self._transports) if self._channel else None
            self._clients[client] = client(transport=own) if own else client(**self._transports)
        return self._clients[client]

    def zone(self, zone: str) -> str:
        """Resource name of a zone; ``-`` is all of them."""
        return f"projects/{self.project}/locations/{zone}"

    def call(self, method: Callable[..., Any], what: str, *, judged: tuple[type[Exception], ...] = (), **request: Any) -> Any:
        """Call a client's method, again while what is wrong passes by itself.

        Errors of Google's clients that are ``judged`` are left to the caller, all others become
        a ``ClusterError`` that begins with ``what``.
        """
        pace = self.pace
        retry = Retry(predicate=_passes, initial=pace.retry, maximum=16 * pace.retry, multiplier=2.0, timeout=pace.patience)
        try:
            return method(request=request, retry=retry, timeout=pace.call)
        except judged:
            raise
        except (exceptions.GoogleAPIError, GoogleAuthError, requests.RequestException) as error:
            raise ClusterError(f"{what}: {_hint(error)}") from error


def _passes(error: BaseException) -> bool:
    if isinstance(error, exceptions.TooManyRequests):  # of which ResourceExhausted is one
        return bool(error.reason == _RATE)
    return isinstance(error, _PASSING)


def _hint(error: Exception) -> str:
    """An error of Google's clients in one line, and what to do."""
    cause = error.cause if isinstance(error, exceptions.RetryError) and error.cause else error
    text = " ".join(str(getattr(cause, "message", None) or cause).split())
    if isinstance(cause, GoogleAuthError):
        return f"{text}: log in with `gcloud auth application-default login`, or run where a service account is given"
    if isinstance(cause, exceptions.Forbidden | exceptions.Unauthorized):
        return f"{text}: this identity needs roles/container.admin and roles/compute.viewer in the project"
    if isinstance(cause, exceptions.TooManyRequests):
        return f"{text}: ask for more quota, choose smaller pools, or another region"
    if isinstance(cause, _PASSING):
        return f"no answer: {text}; look at https://status.cloud.google.com and the network, then do it again: nothing is done twice"
    return text
