"""The section ``cluster``: where training runs when one machine is not enough, and on which machines."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from training.config_section import PositiveFloat, PositiveInt, Section

Provider = Literal["local", "gke", "vertex"]
Label = Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""What Google Cloud takes as name and as value of a label."""


class PoolConfig(Section):
    """The machines of one role: a node pool on GKE, a worker pool on Vertex AI."""

    machine_type: str = Field(min_length=1, description="Name of a machine type in the catalogue, such as c2-standard-30.")
    processes_per_machine: PositiveInt = Field(
        1, description="Role processes that share a machine and its pod; a machine with 8 GPUs takes 8 ranks."
    )
    spot: bool = Field(False, description="Machines that may be taken away; only data_loader survives that.")
    compact: bool = Field(False, description="Place the machines close together; not every family can.")
    tier_1: bool = Field(False, description="Tier_1 networking: more bandwidth at a price, where the machine has it.")
    huge_pages_gib: Annotated[int, Field(ge=0)] = Field(0, description="Memory set aside as pages of 1 GiB on every machine.")
    local_ssds: Annotated[int, Field(ge=0, le=32)] = Field(0, description="Local SSDs of 375 GB on every machine.")
    reservation: str | None = Field(None, min_length=1, description="Reservation that holds the machines (profile reserved).")


class PoolsConfig(Section):
    """Machines per role."""

    data_loader: PoolConfig
    embedding_worker: PoolConfig
    nn_worker: PoolConfig
    parameter_server: PoolConfig

    @model_validator(mode="after")
    def _survivable(self) -> Self:
        for role in ("embedding_worker", "nn_worker", "parameter_server"):
            if getattr(self, role).spot:
                raise ValueError(f"{role}.spot: a run does not survive the loss of a {role}; only data_loader can use spot machines")
        return self


class ClusterConfig(Section):
    """Where the roles of training run. ``provider: local`` is this machine and needs nothing else."""

    provider: Provider = Field("local", description="local: this machine; gke: one JobSet on a cluster of its own; vertex: a CustomJob.")
    project: str | None = Field(None, pattern=r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$", description="Google Cloud project.")
    zone: str | None = Field(
        None, pattern=r"^[a-z]+-[a-z]+[0-9]+-[a-z]$", description="The one zone of all machines, such as us-central1-a."
    )
    bucket: str | None = Field(
        None,
        pattern=r"^gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$",
        description="Bucket that all roles see as the directory /gcs/<bucket>: data, checkpoints and logs lie there.",
    )
    image: str | None = Field(
        None,
        pattern=r"^[^\s@]+@sha256:[0-9a-f]{64}$",
        description="Image of every role, by digest: <repository>@sha256:<64 hex>.",
    )
    profile: Literal["on_demand", "reserved", "queued"] = Field(
        "on_demand",
        description="on_demand: ask and hope; reserved: machines of reservations; queued: GPUs through DWS flex-start, then the rest.",
    )
    owner: Label = Field("satrap", description="Label of whoever answers for the bill.")
    max_run_hours: PositiveFloat = Field(
        24.0,
        le=168.0,
        description="After that many hours anyone may delete everything (label satrap-expires).",
    )
    provision_timeout_minutes: PositiveFloat = Field(60.0, description="How long all machines together may take to come up.")
    pools: PoolsConfig | None = Field(None, description="Machines per role; required unless provider is local.")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.provider == "local":
            return self
        missing = [name for name in ("project", "zone", "bucket", "image", "pools") if getattr(self, name) is None]
        if missing:
            raise ValueError(f"{missing[0]}: required when provider is {self.provider} (missing: {', '.join(missing)})")
        assert self.pools is not None
        for role in ("data_loader", "embedding_worker", "nn_worker", "parameter_server"):
            pool: PoolConfig = getattr(self.pools, role)
            if pool.reservation and self.profile != "reserved":
                raise ValueError(f"pools.{role}.reservation: only used with profile reserved, not {self.profile}")
            if self.profile == "reserved" and not pool.reservation and not pool.spot:
                raise ValueError(f"pools.{role}.reservation: required with profile reserved; name the reservation, or change the profile")
        return self
