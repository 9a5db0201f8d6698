"""Scores batches with a checkpoint, in this process: the trainer's own servers and workers, called directly, inserting nothing."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from training.checkpoint import CheckpointManifest, load_config_of
from training.config import Config
from training.data.shards import Batch
from training.dense.models import DenseModel, build_model
from training.dense.session import restore_rows
from training.embedding.codec import decode
from training.embedding.embedding_worker import EmbeddingWorker, Ids
from training.embedding.messages import Kind
from training.embedding.parameter_server import ParameterServer
from training.embedding.slots import slots, tables
from training.embedding.transport import Connection, InProcessTransport, Message
from training.errors import CheckpointError
from training.job import usable_cores

# At half load two-choice buckets lose no row (measured for training/embedding/table.py).
ROOM = 2


class Scorer:
    """A loaded model. A context manager that frees its tables. One thread at a time."""

    def __init__(self, config: Config, manifest: CheckpointManifest, model: DenseModel, worker: Connection, stack: ExitStack) -> None:
        self.config = config
        self.manifest = manifest
        self._model = model
        self._worker = worker
        self._stack = stack

    @property
    def feature_digest(self) -> str:
        """What data must match to be scored: ``Manifest.feature_digest``."""
        return self.manifest.feature_digest

    @classmethod
    def load(cls, checkpoint: Path) -> Scorer:
        """Read and verify a checkpoint; raises ``CheckpointError`` or ``CapacityError``."""
        manifest = CheckpointManifest.load(checkpoint)
        config = load_config_of(checkpoint)
        specs = [replace(spec, capacity_rows=ROOM * manifest.rows[spec.name] + 64) for spec in tables(config)]
        transport = InProcessTransport()
        with ExitStack() as stack:
            server = stack.enter_context(ParameterServer.create(specs, num_servers=1, seed=config.training.seed, wire_dtype="float32"))
            stack.enter_context(transport.serve(server.handle, "server"))
            restore_rows([transport.connect("server", peer="parameter_server-0")], checkpoint)
            worker = stack.enter_context(EmbeddingWorker(slots(config), transport, ["server"], wire_dtype="float32", sync=False))
            stack.enter_context(transport.serve(worker.handle, "worker"))
            return cls(
                config, manifest, _dense(config, checkpoint), transport.connect("worker", peer="embedding_worker-0"), stack.pop_all()
            )

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def score(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits float32 [N]. Ids without a row count as zeros."""
        ids = Ids(batch.signs, [(bag.offsets, bag.values) for bag in batch.bags])
        reply = self._worker.request(Message(Kind.LOOK_UP_IDS, {}, ids.packed()))
        embeddings_NE = torch.from_numpy(decode(reply.arrays[0], reply.meta["scale"]))
        with torch.no_grad():
            logits: npt.NDArray[np.float32] = self._model(torch.from_numpy(np.array(batch.dense)), embeddings_NE).numpy()
        return logits


def _dense(config: Config, checkpoint: Path) -> DenseModel:
    torch.set_num_threads(usable_cores())
    model = build_model(config)
    try:
        model.load_state_dict(torch.load(checkpoint / "dense.pt", weights_only=True)["model"])
    except (OSError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{checkpoint / 'dense.pt'}: does not fit this model: {' '.join(str(error).split())[:300]}") from None
    return model.eval()
