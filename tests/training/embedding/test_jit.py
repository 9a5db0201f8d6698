"""The cache of compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from training.embedding.jit import kernel

HELPER = "from training.embedding.jit import inlined\n\n@inlined\ndef number():\n    return {}\n"
KERNEL = "from helper import number\nfrom training.embedding.jit import kernel\n\n@kernel\ndef twice():\n    return 2 * number()\n"
MAIN = "from kernels import twice\nprint(twice(), sum(twice.stats.cache_hits.values()))\n"


def run(folder: Path) -> str:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", MAIN], env=environment, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def test_compiled_code_is_reused_until_a_helper_in_another_file_changes(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(HELPER.format(4))
    (tmp_path / "kernels.py").write_text(KERNEL)
    assert run(tmp_path) == "8 0"
    assert run(tmp_path) == "8 1"
    (tmp_path / "helper.py").write_text(HELPER.format(5))
    assert run(tmp_path) == "10 0"


def test_a_function_that_cannot_be_cached_still_compiles() -> None:
    """numba refuses to cache what has no file; a file in a read-only image without a home meets the same refusal."""
    scope: dict[str, object] = {}
    exec("def three():\n    return 3\n", scope)
    assert kernel(scope["three"])() == 3
