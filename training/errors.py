"""The exception tree. Every error a user can cause or meet is one of these; the CLI prints its text, never a traceback.

SatrapError
├── ConfigError            the YAML file or a --set override is wrong; lists every problem with its path
├── DataError              input that cannot be used
│   ├── SourceError        no such file, unreadable, empty, wrong columns
│   ├── DeadLetterError    too large a share of malformed records
│   ├── ManifestError      a data directory without, or with a damaged, manifest
│   └── ValidationError    a drift or schema check failed its threshold
├── TrainingError          a run that cannot go on
│   ├── RoleError          a role process died, hung or never came up
│   ├── TransportError     a connection broke, a peer answered with an error or not in time
│   ├── CapacityError      a table does not fit in memory
│   └── CheckpointError    a checkpoint is missing, damaged or of another model
├── RegistryError          the model registry refuses an operation
└── ClusterError           a cloud refuses machines, loses them, or does not answer in time
"""

from __future__ import annotations


class SatrapError(Exception):
    """Base of all errors raised on purpose. ``str(error)`` says what, with which value, and what to do next."""


def os_error_text(error: OSError) -> str:
    """What went wrong with which file, for an error of the operating system: full disks and read-only folders are no defects."""
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{error.strerror or error}; free space there, or choose another place (output.root, -o)"


class ConfigError(SatrapError):
    """The configuration was refused. ``problems`` holds one line per fault: path, value, legal choices."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class DataError(SatrapError):
    """Input data that cannot be used."""


class SourceError(DataError):
    """A source file is missing, unreadable, empty or lacks declared columns."""


class DeadLetterError(DataError):
    """The share of malformed records is above ``data.max_dead_fraction``."""


class ManifestError(DataError):
    """A data directory has no manifest, or one that does not match its files."""


class ValidationError(DataError):
    """The data failed a threshold of the ``validation`` section."""


class TrainingError(SatrapError):
    """A training run that cannot go on."""


class RoleError(TrainingError):
    """A role process exited, hung, or never announced itself."""


class TransportError(TrainingError):
    """A connection broke, or a peer answered with an error or not within its deadline."""


class CapacityError(TrainingError):
    """An embedding table does not fit the memory of its machine."""


class CheckpointError(TrainingError):
    """A checkpoint is missing, damaged, or belongs to another configuration."""


class RegistryError(SatrapError):
    """The model registry refuses an operation."""


class ClusterError(SatrapError):
    """A cloud refused something, failed at it, or did not answer within its deadline."""
