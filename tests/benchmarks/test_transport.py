"""The transport benchmark runs, and all its servers answer."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_quick_benchmark_prints_a_ratio_for_every_transport():
    command = [sys.executable, "-m", "benchmarks.transport", "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=100)
    assert result.returncode == 0, result.stderr
    for count in (1, 2):
        assert f"{count} client(s)" in result.stdout
    assert all(result.stdout.count(f"\n  {case} ") == 2 for case in ("unix", "shared", "tcp", "shared+table"))
