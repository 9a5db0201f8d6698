"""How kernels are compiled: by numba, without the GIL, once per machine and version of the sources.

Kernels are plain module-level functions that take widths and settings as arguments: numba's disk cache never hits for closures that
capture compiled functions. Left alone it also watches only the file a kernel stands in, and goes on running old code when a helper in
another file has changed; here it watches all files of the folder that compile anything.

Kernels allocate nothing and keep no array, so numba's reference counting is off: it counted up and down around every sign (2.3x slower).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first use, without the GIL, and keep the machine code on disk.

    Where no cache directory can be written (read-only image without a home) it compiles again in every process; set NUMBA_CACHE_DIR.
    """
    try:
        dispatcher = njit(nogil=True, error_model="numpy", cache=True, _nrt=False)(function)
    except RuntimeError:  # numba found nowhere to put the cache
        return njit(nogil=True, error_model="numpy", _nrt=False)(function)
    dispatcher._cache._cache_file._source_stamp = _sources_digest(Path(inspect.getfile(function)).parent)
    return dispatcher


def inlined(function: Callable[..., Any]) -> Any:
    """A helper that becomes part of every kernel that calls it."""
    return njit(nogil=True, error_model="numpy", forceinline=True, _nrt=False)(function)


@functools.cache
def _sources_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        text = path.read_bytes()
        if b"numba" in text or b"jit import" in text:
            digest.update(text)
    return digest.hexdigest()
