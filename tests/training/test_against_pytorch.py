"""The trainer's rules, held to a plain single-process PyTorch program: nn parameters, torch.optim, nothing of ours but the network."""

import dataclasses
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from training.checkpoint import CheckpointManifest
from training.data.manifest import Manifest
from training.data.shards import ShardReader
from training.dense.models import build_model, build_optimizer
from training.embedding.messages import Kind
from training.embedding.slots import slots, tables
from training.embedding.table import EmbeddingTable
from training.errors import TrainingError
from training.events import read_events
from training.in_process import in_process_trainer
from training.scorer import Scorer

OPTIMIZERS = {
    "sgd": "{name: sgd, learning_rate: 0.5}",
    "sgd with momentum": "{name: sgd, learning_rate: 0.2, momentum: 0.9}",
    "adagrad": "{name: adagrad, learning_rate: 0.1, initial_accumulator: 0.01}",
    "rowwise_adagrad": "{name: rowwise_adagrad, learning_rate: 0.1}",
    "adam": "{name: adam, learning_rate: 0.02}",
}


class RowwiseAdagrad(torch.optim.Optimizer):
    """torch has none: one accumulator per row, the mean of g^2."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state.setdefault(p, {"sum": torch.zeros(())})
                    state["sum"] += p.grad.square().mean()
                    p -= group["lr"] * p.grad / (state["sum"].sqrt() + 1e-8)


def row_optimizer(own, rows):
    if own.name == "sgd":
        return torch.optim.SGD(rows, lr=own.learning_rate, momentum=own.momentum)
    if own.name == "adagrad":
        return torch.optim.Adagrad(rows, lr=own.learning_rate, eps=own.eps, initial_accumulator_value=own.initial_accumulator)
    if own.name == "rowwise_adagrad":
        return RowwiseAdagrad(rows, own.learning_rate)
    return torch.optim.Adam(rows, lr=own.learning_rate, betas=(own.beta1, own.beta2), eps=own.eps)


class PlainPyTorch:
    """Every row a parameter of its own, so that torch.optim, too, leaves untouched rows alone."""

    def __init__(self, config, data_dir):
        self.config = config
        (spec,) = tables(config)
        with ShardReader.open(data_dir, "train") as reader:
            self.train = reader.read(0, reader.rows)
        signs = np.unique(np.concatenate([self.train.signs.ravel(), self.train.bags[0].values]))
        first = np.empty((len(signs), spec.dim), np.float32)
        with EmbeddingTable.create(spec, capacity_rows=1000, seed=config.training.seed) as table:
            table.lookup(signs, first, insert=True)
        self.rows = {int(sign): torch.nn.Parameter(torch.from_numpy(row.copy())) for sign, row in zip(signs, first, strict=True)}
        self.model = build_model(config)
        self.dense_optimizer = build_optimizer(config, self.model)
        self.row_optimizer = row_optimizer(spec.optimizer, list(self.rows.values()))

    def embeddings(self, batch):
        out = []
        zero = torch.zeros(self.config.embedding.dim)
        for n in range(len(batch)):
            bag = batch.bags[0].values[batch.bags[0].offsets[n] : batch.bags[0].offsets[n + 1]]
            pooled = torch.stack([self.rows[int(s)] for s in bag]).mean(0) if len(bag) else zero
            out.append(torch.cat([self.rows[int(batch.signs[n, 0])], pooled, self.rows[int(batch.signs[n, 1])]]))
        return torch.stack(out)

    def run(self, steps):
        losses = []
        size = self.config.training.batch_size
        per_epoch = -(-len(self.train) // size)
        for step in range(steps):
            start = step % per_epoch * size
            batch = part(self.train, start, min(start + size, len(self.train)))
            self.dense_optimizer.zero_grad()
            self.row_optimizer.zero_grad(set_to_none=True)
            logits = self.model(torch.from_numpy(batch.dense), self.embeddings(batch))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.label))
            loss.backward()
            self.dense_optimizer.step()
            self.row_optimizer.step()
            losses.append(float(loss.detach()))
        return losses


def part(batch, start, stop):
    offsets = batch.bags[0].offsets[start : stop + 1]
    bag = dataclasses.replace(batch.bags[0], offsets=offsets - offsets[0], values=batch.bags[0].values[offsets[0] : offsets[-1]])
    return dataclasses.replace(
        batch, label=batch.label[start:stop], dense=batch.dense[start:stop], signs=batch.signs[start:stop], bags=(bag,), time=None
    )


def trained(config, data_dir, output_dir, events, **options):
    """The in-process trainer's result: final checkpoint and rank."""
    with in_process_trainer(config, data_dir, output_dir, events=events, **options) as rank:
        return rank.run(), rank


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_one_rank_in_mode_sync_is_plain_pytorch(configured, clicks_data, tmp_path, events, optimizer):
    config = configured(f"embedding.optimizer={optimizer}")
    reference = PlainPyTorch(config, clicks_data)
    checkpoint, rank = trained(config, clicks_data, tmp_path, events)
    reference.run(rank.progress.step)
    assert rank.progress.step == 2 * -(-Manifest.load(clicks_data).rows("train") // 64)
    for name, tensor in reference.model.state_dict().items():
        torch.testing.assert_close(rank.model.state_dict()[name], tensor, rtol=2e-4, atol=2e-6)
    some = part(reference.train, 0, 200)
    with Scorer.load(checkpoint) as scorer, torch.no_grad():
        expected = reference.model(torch.from_numpy(some.dense), reference.embeddings(some)).numpy()
        np.testing.assert_allclose(scorer.score(some), expected, rtol=1e-3, atol=2e-5)


@pytest.fixture
def short():
    """A directory whose path leaves room for a socket's name: 107 bytes in all."""
    with tempfile.TemporaryDirectory(prefix="satrap-") as folder:
        yield Path(folder)


class SlowServer:
    """A parameter server whose updates wait for a look-up of another batch, so that staleness must build up to its bound."""

    def __init__(self, server, bound):
        self.inner = server
        self.tables = server.tables
        self.bound = bound
        self.lock = threading.Condition()
        self.looked_up = 0
        self.applied = 0
        self.largest = 0

    def handle(self, message):
        if message.kind == Kind.ROWS_OF and message.meta["insert"]:
            with self.lock:
                self.largest = max(self.largest, self.looked_up - self.applied)
                self.looked_up += 1
                self.lock.notify_all()
        if message.kind == Kind.APPLY:
            with self.lock:
                self.lock.wait_for(lambda: self.looked_up - self.applied > self.bound, timeout=0.05)
        reply = self.inner.handle(message)
        if message.kind == Kind.APPLY:
            with self.lock:
                self.applied += 1
        return reply


@pytest.mark.parametrize(
    ("mode", "max_staleness", "bound"), [("sync", 4, 0), ("hybrid", 0, 0), ("hybrid", 1, 1), ("hybrid", 3, 3), ("async", 2, 2)]
)
@pytest.mark.parametrize("sockets", [False, True], ids=["calls", "shared memory"])
def test_staleness_reaches_its_bound_and_never_exceeds_it(configured, clicks_data, short, events, mode, max_staleness, bound, sockets):
    """Counted by the parameter server itself: batches looked up there and not yet updated there."""
    config = configured(
        f"training.mode={mode}", f"training.max_staleness={max_staleness}", "training.max_steps=24", "training.evaluate_every_steps=12",
        "training.roles.parameter_server=1", "training.roles.embedding_worker=2", "training.roles.data_loader=2",
    )  # fmt: skip
    observed = []
    over = short if sockets else None
    _, rank = trained(
        config, clicks_data, short / "out", events, sockets=over, wrap=lambda s: observed.append(SlowServer(s, bound)) or observed[-1]
    )
    assert observed[0].largest == bound
    assert observed[0].looked_up == observed[0].applied == 24
    assert rank.progress.step == 24


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_shared_memory_changes_no_bit(configured, clicks_data, short, events, dtype):
    config = configured(f"training.wire_dtype={dtype}", "training.max_steps=15", "training.roles.embedding_worker=2", "embedding.dim=8")
    files = []
    for sockets in (None, short):
        checkpoint, _ = trained(config, clicks_data, short / str(sockets is None), events, sockets=sockets)
        manifest = CheckpointManifest.load(checkpoint)
        files.append({name: digest for name, digest in manifest.files.items() if name.startswith("embedding")})
    assert files[0] == files[1]


def test_a_step_with_nan_is_skipped_by_both_halves_and_counted(configured, clicks_data, tmp_path, events):
    config = configured("training.max_steps=10")

    def run(folder, poison):
        with in_process_trainer(config, clicks_data, tmp_path / folder, events=events) as rank:
            take = rank.around.feeder.next

            def next_batch():
                batch = take()
                if batch is not None and batch.step == poison:
                    batch.dense[3, 0] = np.nan
                return batch

            rank.around.feeder.next = next_batch
            seen = {}
            step = rank._step

            def watched(batch):
                before = [p.detach().clone() for p in rank.model.parameters()]
                rows = [table.sample(10_000) for table in rank_tables(rank)]
                step(batch)
                rank.around.feeder.drain()
                seen[batch.step] = (
                    all(torch.equal(a, b) for a, b in zip(before, rank.model.parameters(), strict=True)),
                    all(np.array_equal(a[1], t.sample(10_000)[1]) for a, t in zip(rows, rank_tables(rank), strict=True)),
                )

            rank._step = watched
            rank.run()
            return rank.progress.skipped_steps, seen

    skipped, unchanged = run("poisoned", 4)
    assert skipped == 1
    assert unchanged[4] == (True, True)
    assert all(unchanged[step] == (False, False) for step in range(10) if step != 4)


def rank_tables(rank):
    """The tables behind an in-process rank."""
    return [table for server in rank.around.servers for table in server._handler.__self__.tables]


def test_a_run_of_nothing_but_nan_fails_and_says_why(configured, clicks_data, tmp_path, events):
    config = configured(
        "training.epochs=20", "training.evaluate_every_steps=1000", "training.dense_optimizer={name: sgd, learning_rate: 1.0e30}"
    )
    with (
        pytest.raises(TrainingError, match=r"100 steps in a row.*learning_rate"),
        in_process_trainer(config, clicks_data, tmp_path, events=events) as rank,
    ):
        rank.run()


def test_a_run_whose_model_diverged_fails_at_its_next_evaluation(configured, clicks_data, tmp_path, events):
    config = configured("training.dense_optimizer={name: sgd, learning_rate: 1.0e30}")
    with (
        in_process_trainer(config, clicks_data, tmp_path, events=events) as rank,
        pytest.raises(TrainingError, match=r"has diverged: at step 14 it scores \d+ of \d+ valid records as NaN or infinite"),
    ):
        rank.run()


def test_a_resumed_run_equals_an_uninterrupted_one(configured, clicks_data, tmp_path, events):
    settings = ("training.shuffle=true", "model.dropout=0.2", "embedding.capacity_rows=64", "embedding.optimizer={name: adam}")
    every = (*settings, "training.checkpoint_every_steps=5", "training.evaluate_every_steps=5", "training.keep_checkpoints=9")
    whole, _ = trained(configured(*every), clicks_data, tmp_path / "whole", events)
    trained(configured(*every, "training.max_steps=10"), clicks_data, tmp_path / "cut", events)
    middle = tmp_path / "cut" / "checkpoints" / "step-00000010"
    resumed, rank = trained(configured(*every), clicks_data, tmp_path / "resumed", events, resume=middle)
    a, b = CheckpointManifest.load(whole), CheckpointManifest.load(resumed)
    assert a.step == b.step == rank.progress.step > 20
    assert {name: digest for name, digest in a.files.items() if name.startswith("embedding")} == {
        name: digest for name, digest in b.files.items() if name.startswith("embedding")
    }
    first, second = (torch.load(c / "dense.pt", weights_only=True) for c in (whole, resumed))
    for name in first["model"]:
        assert torch.equal(first["model"][name], second["model"][name]), name


def test_evaluation_inserts_nothing_and_changes_nothing(configured, clicks_data, tmp_path, events):
    config = configured("training.max_steps=6", "training.evaluate_every_steps=3", "embedding.capacity_rows=64")
    digests = []
    with in_process_trainer(config, clicks_data, tmp_path, events=events) as rank:
        evaluate = rank._evaluate

        def watched():
            for folder in ("before", "after"):
                if folder == "after":
                    evaluate()
                for number, table in enumerate(rank_tables(rank)):
                    place = tmp_path / f"{folder}-{rank.progress.step}-{number}"
                    place.mkdir()
                    table.snapshot(place)
                    digests.append({f.name: f.read_bytes() for f in place.iterdir()})
            return False

        rank._evaluate = watched
        rank.run()
    assert len(digests) == 8
    assert digests[0:2] == digests[2:4]
    assert digests[4:6] == digests[6:8]


def test_server_count_does_not_change_a_run_in_mode_sync(configured, clicks_data, tmp_path, events):
    scores = []
    with ShardReader.open(clicks_data, "test") as reader:
        batch = reader.read(0, reader.rows)
    for servers in (1, 3):
        config = configured(f"training.roles.parameter_server={servers}", "training.max_steps=15")
        checkpoint, _ = trained(config, clicks_data, tmp_path / str(servers), events)
        with Scorer.load(checkpoint) as scorer:
            scores.append(scorer.score(batch))
    np.testing.assert_array_equal(scores[0], scores[1])


def test_the_end_of_data_ends_the_run_at_once_and_short_last_steps_train(configured, clicks_data, tmp_path, events):
    config = configured("training.epochs=1", "training.batch_size=500", "training.request_timeout_seconds=5.0")
    _, rank = trained(config, clicks_data, tmp_path, events)
    assert rank.progress.step == -(-Manifest.load(clicks_data).rows("train") // 500)
    done = [e for e in read_events(events.path) if e["kind"] == "progress"]
    assert done[-1]["done"] == done[-1]["total"] == rank.progress.step


def test_half_precision_on_the_wire_stays_close_to_full(configured, clicks_data, tmp_path, events):
    with ShardReader.open(clicks_data, "test") as reader:
        batch = reader.read(0, reader.rows)
    scores = []
    for dtype in ("float32", "float16"):
        checkpoint, _ = trained(configured(f"training.wire_dtype={dtype}"), clicks_data, tmp_path / dtype, events)
        with Scorer.load(checkpoint) as scorer:
            scores.append(scorer.score(batch))
    assert np.abs(scores[0]).max() > 0.5
    assert np.abs(scores[0] - scores[1]).mean() < 0.01 * np.abs(scores[0]).mean()


def test_slots_of_other_widths_and_optimizers_live_in_tables_of_their_own(configured, clicks_data, tmp_path, events):
    config = configured("embedding.slots={user: {dim: 6}, item: {optimizer: {name: adam}}}")
    assert [(spec.dim, spec.optimizer.name) for spec in tables(config)] == [(6, "adagrad"), (4, "adagrad"), (4, "adam")]
    assert [slot.table for slot in slots(config)] == [0, 1, 2]
    checkpoint, rank = trained(config, clicks_data, tmp_path, events)
    assert rank.progress.metrics["auc"] > 0.6
    rows = CheckpointManifest.load(checkpoint).rows
    assert all(count > 0 for count in rows.values())
    assert len(rows) == 3
