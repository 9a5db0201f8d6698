"""How kernels are compiled: by numba, without the GIL, once per machine and source file.

Kernels are plain module-level functions that take widths and settings as arguments: numba's disk cache never hits for closures that
capture compiled functions. It also watches only the file a kernel stands in, so a change in ``simd.py`` or ``hashing.py`` reaches
machines with an old cache only if the files that use it change too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def kernel(function: Callable[..., Any]) -> Any:
    """Compile on first use, without the GIL, and keep the machine code on disk.

    Where no cache directory can be written (read-only image without a home) it compiles again in every process; set NUMBA_CACHE_DIR.
    """
    try:
        return njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba found nowhere to put the cache
        return njit(nogil=True)(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A helper that becomes part of every kernel that calls it."""
    return njit(nogil=True, forceinline=True)(function)
