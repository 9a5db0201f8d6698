from dataclasses import replace

import numpy as np
import pytest

from infra.plan.catalogue import machine_type
from infra.plan.memory import memory_of, needed_bytes, servers_needed, size_text, table_memory, usable_bytes
from infra.plan.plan import preset_config
from infra.plan.shape import Pool, shape_of
from infra.plan.workload import Workload
from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding.footprint import table_bytes
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable


def spec_of(optimizer="adagrad", *, dim=16, rows=100_000, row_dtype="float32", min_count=1):
    return TableSpec("t", dim, SparseOptimizerConfig(name=optimizer), InitializerConfig(), min_count, rows, row_dtype)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam"])
@pytest.mark.parametrize("row_dtype", ["float32", "float16"])
@pytest.mark.parametrize(("dim", "num_servers", "min_count"), [(16, 1, 1), (7, 3, 2), (128, 30, 1)])
def test_the_parts_of_a_row_add_up_to_the_table(optimizer, row_dtype, dim, num_servers, min_count):
    spec = spec_of(optimizer, dim=dim, row_dtype=row_dtype, min_count=min_count, rows=3_000_000)
    found = table_memory(spec, num_servers=num_servers)
    parts = found.value_bytes + found.state_bytes + found.index_bytes + found.unused_bytes
    assert parts * found.rows == pytest.approx(found.total_bytes)
    assert found.total_bytes == table_bytes(spec, capacity_rows=spec.capacity_rows, num_servers=num_servers)
    assert found.value_bytes == {"float32": 4 * dim, "float16": -(-dim // 2) * 4}[row_dtype]
    assert found.state_bytes == {"sgd": 0, "adagrad": 4 * dim, "rowwise_adagrad": 4, "adam": 8 * dim + 4}[optimizer]


@pytest.mark.parametrize(("rows", "min_count"), [(100_000, 1), (10**9, 1), (781_250_000_000, 1), (10**9, 3)])
def test_the_index_takes_no_more_than_16_bytes_a_row(rows, min_count):
    assert 0 < table_memory(spec_of(rows=rows, min_count=min_count), num_servers=4).index_bytes <= 16


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adam"])
def test_a_checkpoint_is_as_large_as_a_tables_snapshot(optimizer, tmp_path):
    spec = spec_of(optimizer, rows=50_000)
    with EmbeddingTable.create(spec, capacity_rows=spec.capacity_rows, seed=0) as table:
        signs = np.random.default_rng(0).integers(0, 2**64, spec.capacity_rows, dtype=np.uint64)
        table.lookup(signs, np.empty((len(signs), spec.dim), np.float32), insert=True)
        table.snapshot(tmp_path)
        written = sum(file.stat().st_size for file in tmp_path.iterdir())
        planned = table_memory(spec, num_servers=1).checkpoint_bytes
        assert planned / spec.capacity_rows == pytest.approx(written / table.rows, rel=0.1)


@pytest.mark.parametrize("each", [1, 4])
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("name", ["m2-ultramem-416", "m3-ultramem-128", "c4-highmem-32"])
def test_the_number_of_servers_needed_holds_the_tables_and_one_less_does_not(name, dim, each):
    workload = Workload.of(preset_config("gke_small", [f"embedding.dim={dim}", "embedding.capacity_rows=900000000000"]))
    pool = Pool("parameter_server", 1, each, machine_type(name, where="here"))
    count = servers_needed(workload, pool)

    def fits(servers):
        total = sum(table.total_bytes for table in memory_of(workload, num_servers=servers, known=False))
        return needed_bytes(total, pool.sized(servers)) <= usable_bytes(pool)

    assert count > 1
    assert fits(count)
    assert not any(fits(smaller) for smaller in range(max(1, count - 2 * each), count))


def test_processes_of_one_machine_share_its_memory():
    pool = Pool("parameter_server", 10, 4, machine_type("m2-ultramem-416", where="here"))
    assert (pool.machines, needed_bytes(1000.0, pool)) == (3, 400.0)
    assert needed_bytes(1000.0, replace(pool, processes=2)) == 1000.0


def test_on_one_machine_all_tables_lie_in_it():
    config = preset_config("laptop", ["training.roles.parameter_server=3"])
    shape = shape_of(config, machine_type("c2-standard-8", where="here"))
    total = sum(table.total_bytes for table in memory_of(Workload.of(config), num_servers=3, known=False))
    assert needed_bytes(total, shape.pool("parameter_server")) == pytest.approx(total)


def test_sizes_are_decimal():
    assert [size_text(n) for n in (999.0, 1.5e6, 2.5e9, 252.33e12)] == ["999 B", "1.5 MB", "2.5 GB", "252.3 TB"]
