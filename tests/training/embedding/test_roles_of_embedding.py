"""Parameter servers and an embedding worker, called directly: pooling, merging, waiting for ranks, wrong requests."""

import socket
import threading
import tracemalloc
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding import places as places_module
from training.embedding import table as table_module
from training.embedding.codec import WIRE_DTYPES, decode, encode
from training.embedding.embedding_worker import EmbeddingWorker, Ids
from training.embedding.messages import Kind
from training.embedding.parameter_server import ParameterServer
from training.embedding.places import KeptPlaces
from training.embedding.slots import Slot, TableSpec
from training.embedding.sockets import SocketTransport
from training.embedding.transport import InProcessTransport, Message
from training.errors import TransportError

BIG = 2**64 - 1


def spec(**changes):
    optimizer = SparseOptimizerConfig(name="adagrad", learning_rate=0.5)
    return TableSpec(
        **{"name": "t", "dim": 3, "optimizer": optimizer, "initializer": InitializerConfig(scale=0.5), "min_count": 1, "capacity_rows": 500}
        | changes
    )


class Cluster:
    """Servers and one worker behind an in-process transport."""

    def __init__(
        self, stack, slots, specs, *, num_servers=2, sync_ranks=0, timeout_seconds=5.0, wire="float32", transport=None, place="{}"
    ):
        self.transport = transport or InProcessTransport()
        addresses = []
        self.open = []
        self.roles = []
        for i in range(num_servers):
            server = ParameterServer.create(
                specs, num_servers=num_servers, seed=7, wire_dtype=wire, sync_ranks=sync_ranks, timeout_seconds=timeout_seconds
            )
            self.roles.append(stack.enter_context(server))
            self.open.append(stack.enter_context(self.transport.serve(self.roles[-1].handle, place.format(f"s{i}"))))
            addresses.append(self.open[-1].address)
        self.servers = [self.transport.connect(address, peer=address) for address in addresses]
        self.role = stack.enter_context(EmbeddingWorker(slots, self.transport, addresses, wire_dtype=wire, sync=sync_ranks > 0))
        stack.enter_context(self.transport.serve(self.role.handle, place.format("w")))
        self.worker = self.transport.connect(place.format("w"), peer="embedding_worker-0")
        for connection in (*self.servers, self.worker):
            stack.callback(connection.close)

    def put(self, ref, signs, bags=(), *, rank=0, step=0):
        ids = Ids(np.array(signs, np.uint64), [(np.array(o, np.int64), np.array(v, np.uint64)) for o, v in bags])
        self.worker.request(Message(Kind.PUT_IDS, {"ref": ref, "rank": rank, "step": step}, ids.packed()))
        return ids

    def look_up(self, ref):
        return self.worker.request(Message(Kind.LOOK_UP, {"ref": ref})).arrays[0]

    def rows(self, ids):
        return self.worker.request(Message(Kind.LOOK_UP_IDS, {}, ids.packed())).arrays[0]

    def update(self, ref, gradient, *, skip=False):
        arrays = [] if skip else [np.asarray(gradient, np.float32)]
        return self.worker.request(Message(Kind.UPDATE, {"ref": ref, "scale": 1.0, "skip": skip}, arrays))


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


def single(name, table=0, dim=3):
    return Slot(name, name, table, dim, multi_valued=False, pooling="sum")


def bag(name, pooling, table=0, dim=3):
    return Slot(name, name, table, dim, multi_valued=True, pooling=pooling)


def test_slots_keep_their_columns_whatever_their_table_and_kind(stack):
    slots = [bag("b", "sum", table=1, dim=2), single("a"), bag("c", "mean"), single("d", table=1, dim=2)]
    cluster = Cluster(stack, slots, [spec(), spec(name="u", dim=2)])
    ids = cluster.put(1, [[11, 21], [12, 22]], [([0, 2, 2], [31, 32]), ([0, 1, 4], [11, 12, 12, BIG])])
    out = cluster.look_up(1)
    assert out.shape == (2, 2 + 3 + 3 + 2)
    one = {s: cluster.rows(Ids(np.array([[s, 99]], np.uint64), [(np.array([0, 0]), np.zeros(0, np.uint64))] * 2))[0, 2:5] for s in (11, 12)}
    np.testing.assert_array_equal(out[0, 2:5], one[11])
    np.testing.assert_array_equal(out[0, 5:8], one[11])
    np.testing.assert_array_equal(out[1, :2], [0, 0])
    both = cluster.rows(Ids(np.array([[0, 31], [0, 32]], np.uint64), [(np.array([0, 0, 0]), np.zeros(0, np.uint64))] * 2))[:, 8:]
    np.testing.assert_allclose(out[0, :2], both.sum(0), rtol=1e-6)
    np.testing.assert_array_equal(cluster.rows(ids), out)


def test_a_sign_in_two_slots_of_a_group_is_one_row_with_one_update(stack):
    """Adagrad tells one update by g1 + g2 from two updates."""
    cluster = Cluster(stack, [single("home"), single("work")], [spec()])
    ids = cluster.put(1, [[5, 5], [5, 6]])
    before = cluster.look_up(1).copy()
    np.testing.assert_array_equal(before[0, :3], before[0, 3:])
    gradient = np.arange(1.0, 13.0, dtype=np.float32).reshape(2, 6)
    cluster.update(1, gradient)
    row = torch.nn.Parameter(torch.from_numpy(before[0, :3].copy()))
    row.grad = torch.from_numpy(gradient[0, :3] + gradient[0, 3:] + gradient[1, :3])
    torch.optim.Adagrad([row], lr=0.5, eps=1e-8).step()
    np.testing.assert_allclose(cluster.rows(ids)[0, :3], row.detach().numpy(), rtol=1e-6)


def test_pooling_has_the_gradient_autograd_gives(stack):
    sgd = SparseOptimizerConfig(name="sgd", learning_rate=1.0)
    for pooling in ("sum", "mean"):
        with ExitStack() as inner:
            cluster = Cluster(inner, [bag("b", pooling)], [spec(optimizer=sgd)], num_servers=3)
            offsets, values = [0, 3, 3, 5], [1, 2, 1, BIG, 2]
            ids = cluster.put(1, np.zeros((3, 0)), [(offsets, values)])
            out = cluster.look_up(1).copy()
            known = {
                s: cluster.rows(Ids(np.zeros((1, 0), np.uint64), [(np.array([0, 1]), np.array([s], np.uint64))]))[0].copy()
                for s in set(values)
            }
            rows = {s: torch.tensor(row, requires_grad=True) for s, row in known.items()}
            gradient = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
            pooled = []
            for n in range(3):
                mine = [rows[v] for v in values[offsets[n] : offsets[n + 1]]]
                pooled.append((torch.stack(mine).mean(0) if pooling == "mean" else torch.stack(mine).sum(0)) if mine else torch.zeros(3))
            np.testing.assert_allclose(out, torch.stack(pooled).detach().numpy(), rtol=1e-6)
            (torch.stack(pooled) * gradient).sum().backward()
            cluster.update(1, gradient.numpy())
            for n in range(3):
                pooled[n] = [rows[v].detach() - rows[v].grad for v in values[offsets[n] : offsets[n + 1]]]
            after = cluster.rows(ids)
            expected = [(torch.stack(p).mean(0) if pooling == "mean" else torch.stack(p).sum(0)) if p else torch.zeros(3) for p in pooled]
            np.testing.assert_allclose(after, torch.stack(expected).numpy(), rtol=1e-5, atol=1e-6)


def test_in_mode_sync_the_updates_of_all_ranks_become_one(stack):
    both, one = (Cluster(stack, [single("a")], [spec()], sync_ranks=ranks) for ranks in (2, 0))
    gradient = np.arange(1.0, 13.0, dtype=np.float32).reshape(4, 3)
    ids = one.put(1, [[5], [BIG], [5], [8]])
    one.look_up(1)
    one.update(1, gradient)
    for rank, rows in enumerate(([[5], [BIG]], [[5], [8]])):
        both.put(rank, rows, rank=rank)
        both.look_up(rank)
    other = both.transport.connect("w", peer="embedding_worker-0")
    first = threading.Thread(target=lambda: other.request(Message(Kind.UPDATE, {"ref": 1, "scale": 1.0, "skip": False}, [gradient[2:]])))
    first.start()
    both.update(0, gradient[:2])
    first.join(5)
    np.testing.assert_allclose(both.rows(ids), one.rows(ids), rtol=1e-6)


def test_in_mode_sync_a_missing_rank_is_named(stack):
    cluster = Cluster(stack, [single("a")], [spec()], num_servers=1, sync_ranks=3, timeout_seconds=0.1)
    cluster.put(1, [[5]])
    cluster.look_up(1)
    with pytest.raises(TransportError, match=r"step 0: no update of nn_worker rank\(s\) \[1, 2\] within 0\.1 s"):
        cluster.update(1, np.ones((1, 3)))


@pytest.mark.parametrize("sync_ranks", [0, 1])
def test_a_skipped_batch_changes_no_row_and_is_let_go(stack, sync_ranks):
    cluster = Cluster(stack, [single("a")], [spec()], sync_ranks=sync_ranks)
    ids = cluster.put(1, [[5]])
    before = cluster.look_up(1).copy()
    cluster.update(1, None, skip=True)
    np.testing.assert_array_equal(cluster.rows(ids), before)
    with pytest.raises(TransportError, match="batch 1 is not held"):
        cluster.look_up(1)


def test_wrong_requests_are_refused_with_a_reason(stack):
    cluster = Cluster(stack, [single("a")], [spec()])
    with pytest.raises(TransportError, match="batch 9 is not held by this embedding_worker"):
        cluster.look_up(9)
    cluster.put(1, [[5]])
    with pytest.raises(TransportError, match="never looked up"):
        cluster.update(1, np.ones((1, 3)))
    with pytest.raises(TransportError, match="an embedding_worker does not answer SNAPSHOT"):
        cluster.worker.request(Message(Kind.SNAPSHOT))
    with pytest.raises(TransportError, match="a parameter_server does not answer LOOK_UP"):
        cluster.servers[0].request(Message(Kind.LOOK_UP))


def test_more_than_255_slots_and_ids_up_to_the_last_do_not_alias(stack):
    slots = [single(f"s{i}") for i in range(300)]
    cluster = Cluster(stack, slots, [spec(capacity_rows=2000)], num_servers=3)
    signs = [[2**64 - 1 - i for i in range(300)], list(range(300))]
    out = cluster.put(1, signs) and cluster.look_up(1).reshape(600, 3)
    assert len(np.unique(out, axis=0)) == 600


def test_rows_step_with_the_rate_of_the_step_that_the_update_carries(stack):
    sgd = SparseOptimizerConfig(name="sgd", learning_rate=1.0, schedule={"warmup_steps": 4})
    cluster = Cluster(stack, [single("a")], [spec(optimizer=sgd, initializer=InitializerConfig(kind="zeros"))])
    value = 0.0
    for step, rate in ((0, 0.25), (2, 0.75), (1, 0.5), (9, 1.0)):
        ids = cluster.put(step, [[5]], step=step)
        cluster.look_up(step)
        cluster.update(step, [[1.0, 1.0, 1.0]])
        value -= rate
        np.testing.assert_array_equal(cluster.rows(ids), np.full((1, 3), value, np.float32))


def halves(cluster, ids, gradient):
    """One step in float16: the decoded output, and the rows after the update."""
    reply = cluster.worker.request(Message(Kind.LOOK_UP, {"ref": 1}))
    out = np.array(decode(reply.arrays[0], reply.meta["scale"]))
    block, scale = encode(gradient, WIRE_DTYPES["float16"])
    cluster.worker.request(Message(Kind.UPDATE, {"ref": 1, "scale": scale, "skip": False}, [block]))
    reply = cluster.worker.request(Message(Kind.LOOK_UP_IDS, {}, ids.packed()))
    return out, np.array(decode(reply.arrays[0], reply.meta["scale"]))


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("big", [1.0, 3e4])
def test_moving_halves_gives_what_going_through_float32_gives(stack, num_servers, big):
    """Servers choose scales of their own; one of the tables has much larger values than the other."""
    slots = [single("a", dim=8), single("b", table=1, dim=16), single("c", dim=8)]
    specs = [spec(dim=8), spec(name="u", dim=16, initializer=InitializerConfig(scale=big))]
    clusters = [Cluster(stack, slots, specs, num_servers=num_servers, wire="float16") for _ in range(2)]
    assert clusters[0].role._moves_halves
    clusters[1].role._moves_halves = False
    rng = np.random.default_rng(1)
    signs = rng.integers(1, 60, (50, 3), dtype=np.uint64)
    gradient = rng.standard_normal((50, 32)).astype(np.float32)
    (out, after), (expected_out, expected_after) = (halves(c, c.put(1, signs), gradient) for c in clusters)
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(after, expected_after)
    assert np.abs(out).min() > 0


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "unix"])
@pytest.mark.parametrize("wire", ["float16", "float32"])
@pytest.mark.parametrize("bags", [False, True])
def test_once_warm_a_step_allocates_nothing_of_a_batchs_size(stack, tmp_path, shared, wire, bags):
    """Worker and servers in this process, so that tracemalloc sees them all. Peak, not sum: what is freed again counts, too."""
    slots = [single(f"s{i}", dim=16, table=i % 2) for i in range(8)] + ([bag("b", "mean", dim=16)] if bags else [])
    specs = [spec(dim=16, capacity_rows=20_000), spec(name="u", dim=16, capacity_rows=20_000)]
    transport = SocketTransport(20.0, "t", shared_memory=shared)
    cluster = Cluster(stack, slots, specs, wire=wire, transport=transport, place=f"unix:{tmp_path}/{{}}")
    rng, records = np.random.default_rng(1), 2000
    ids = [np.arange(records + 1), np.arange(records, dtype=np.uint64)] if bags else []
    batches = [rng.integers(1, 4000, (records, 8), dtype=np.uint64) for _ in range(3)]
    gradient = rng.standard_normal((records, 16 * len(slots))).astype(np.float32)

    def step(ref):
        cluster.worker.request(Message(Kind.PUT_IDS, {"ref": ref, "rank": 0, "step": ref}, [batches[ref % 3], *ids]))
        cluster.worker.request(Message(Kind.LOOK_UP, {"ref": ref}))
        block, scale = encode(gradient, WIRE_DTYPES[wire], cluster.worker.array(gradient.shape, WIRE_DTYPES[wire]))
        cluster.worker.request(Message(Kind.UPDATE, {"ref": ref, "scale": scale, "skip": False}, [block]))

    for ref in range(6):
        step(ref)
    made = cluster.role.shelf.allocations
    tracemalloc.start()
    try:
        step(6)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for ref in range(7, 13):
            step(ref)
        allocated = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert allocated < 48_000 < batches[0].nbytes
    assert cluster.role.shelf.allocations == made == 1


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "unix"])
def test_an_update_cut_off_on_its_way_is_applied_once(stack, tmp_path, shared):
    """Every connection breaks while servers apply an update: the rows are those of a run where none does."""
    slots = [single("a"), single("b")]
    transport = SocketTransport(5.0, "t", shared_memory=shared)
    cut = Cluster(stack, slots, [spec()], transport=transport, place=f"unix:{tmp_path}/{{}}")
    whole = Cluster(stack, slots, [spec()])
    applied = []
    for server in cut.open:
        server._handler = cutting(server, applied)
    rng = np.random.default_rng(4)
    for ref in range(8):
        signs, gradient = rng.integers(1, 9, (20, 2)), rng.standard_normal((20, 6))
        for cluster in (cut, whole):
            ids = cluster.put(ref, signs, step=ref)
            cluster.look_up(ref)
            cluster.update(ref, gradient)
    assert sorted(applied) == sorted([*range(8)] * 2)
    np.testing.assert_array_equal(cut.rows(ids), whole.rows(ids))


def cutting(server, applied):
    handle = server._handler

    def cut(message):
        reply = handle(message)
        if message.kind == Kind.APPLY:
            applied.append(message.meta["step"])
            for sock in list(server._clients):
                sock.shutdown(socket.SHUT_RDWR)
        return reply

    return cut


def test_a_batch_of_no_records_is_looked_up_and_updated(stack):
    """A late rank of a short last step."""
    cluster = Cluster(stack, [single("a"), bag("b", "sum"), single("c", table=1)], [spec(), spec(name="u")])
    cluster.put(1, np.zeros((0, 2)), [([0], [])])
    assert cluster.look_up(1).shape == (0, 9)
    cluster.update(1, np.zeros((0, 9)))


@pytest.mark.parametrize("capacity", [40, 4000], ids=["rows are evicted", "none is"])
@pytest.mark.parametrize("min_count", [1, 2])
def test_rows_become_the_same_whether_or_not_a_server_remembers_where_they_are(stack, monkeypatch, capacity, min_count):
    """Three batches in flight, with signs in common; one is skipped."""
    tables = [spec(capacity_rows=capacity, min_count=min_count), spec(name="u", dim=2, capacity_rows=capacity)]
    slots = [single("a"), single("b", table=1, dim=2)]
    clusters = [Cluster(stack, slots, tables, place=f"{{}}-{k}") for k in range(2)]
    for server in clusters[1].roles:
        monkeypatch.setattr(server.places, "take", lambda _number: None)
    rng, asked = np.random.default_rng(0), []
    update = table_module.EmbeddingTable.update

    def watched(table, signs, gradients, *, draw, places):
        asked.append(places)
        return update(table, signs, gradients, draw=draw, places=places)

    monkeypatch.setattr(table_module.EmbeddingTable, "update", watched)
    for step in range(30):
        signs = rng.zipf(1.3, (50, 2)) % 300
        gradient = rng.standard_normal((50, 5)).astype(np.float32)
        got = []
        for cluster in clusters:
            cluster.put(step, signs, step=step)
            got.append(cluster.look_up(step).copy())
            if step >= 2:
                cluster.update(step - 2, gradient, skip=step == 9)
        np.testing.assert_array_equal(*got)
    assert any(places is not None for places in asked)
    everyone = Ids(np.repeat(np.arange(300, dtype=np.uint64)[:, None], 2, axis=1), [])
    np.testing.assert_array_equal(*(cluster.rows(everyone) for cluster in clusters))


def test_places_that_nobody_comes_for_are_forgotten(monkeypatch):
    monkeypatch.setattr(places_module, "KEPT_BYTES", 10_000)
    kept = KeptPlaces()
    numbers = [kept.keep(kept.new([100, 20])) for _ in range(100)]
    assert kept.shelf.allocations <= 20
    assert kept.take(numbers[0]) is None
    assert kept.take(None) is None
    last = kept.take(numbers[-1])
    assert [len(places.slots) for places in last.of_table] == [100, 20]
    assert kept.take(numbers[-1]) is None
    kept.done(last)
    large = kept.keep(kept.new([10_000]))
    assert kept.take(large) is not None, "the latest is kept whatever its size"
