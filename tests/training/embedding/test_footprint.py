"""What is planned for a table is what it takes."""

import subprocess
import sys

import pytest

from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding import footprint
from training.embedding.optimizers import OPTIMIZERS
from training.embedding.parameter_server import ParameterServer
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable


def spec_of(optimizer, *, dim, min_count, capacity_rows, row_dtype="float32"):
    momentum = 0.9 if optimizer == "momentum_sgd" else 0.0
    config = SparseOptimizerConfig.model_validate({"name": optimizer.removeprefix("momentum_"), "momentum": momentum})
    return TableSpec("t", dim, config, InitializerConfig(), min_count, capacity_rows, row_dtype)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("dim", "min_count", "capacity"), [(1, 1, 1), (16, 2, 20_000), (6, 3, 3001), (64, 1, 5000)])
@pytest.mark.parametrize("row_dtype", ["float32", "float16", "bfloat16"])
def test_the_planned_bytes_are_those_of_the_table(optimizer, dim, min_count, capacity, row_dtype):
    spec = spec_of(optimizer, dim=dim, min_count=min_count, capacity_rows=capacity, row_dtype=row_dtype)
    with EmbeddingTable.create(spec, capacity_rows=capacity, seed=0) as table:
        assert footprint.table_bytes(spec, capacity_rows=capacity, num_servers=1) == table.memory_bytes


@pytest.mark.parametrize("num_servers", [1, 2, 7])
@pytest.mark.parametrize("capacity", [10, 30_000])
def test_the_planned_bytes_are_those_of_all_servers(capacity, num_servers):
    spec = spec_of("adagrad", dim=8, min_count=2, capacity_rows=capacity)
    with ParameterServer.create([spec], num_servers=num_servers, seed=0, wire_dtype="float32") as server:
        taken = sum(table.memory_bytes for table in server.tables)
    assert footprint.table_bytes(spec, capacity_rows=capacity, num_servers=num_servers) == num_servers * taken


def test_planning_needs_no_numba():
    code = "import sys, training.embedding.footprint, training.embedding.memory; assert not {'numba', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
