"""Memory that two processes of one machine share for the arrays of their messages.

An anonymous file (memfd) of fixed size, made by the sender and handed to the receiver over their Unix socket. It has no name in any
file system, so nothing is left behind however a process ends. It is sparse: only what messages have touched takes memory. It is sealed
against resizing, or a peer that truncates it could kill this process with SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from training.embedding.buffers import Array, Bytes

SEGMENT_BYTES = 1 << 30
"""Room for the arrays of one message; larger ones go through the socket."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if hasattr(fcntl, "F_SEAL_SHRINK") else 0


class Segment:
    """One direction of one connection. ``close`` lets go of it; arrays that still lie in it keep its memory alive."""

    def __init__(self, descriptor: int, memory: Bytes) -> None:
        self.descriptor = descriptor
        self.memory = memory
        self._address = memory.ctypes.data

    @classmethod
    def create(cls) -> Segment:
        """For the sender. Raises ``OSError`` or ``ValueError`` where the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memfd_create")
        descriptor = os.memfd_create("satrap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, SEGMENT_BYTES)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(descriptor, np.frombuffer(mmap.mmap(descriptor, SEGMENT_BYTES), np.uint8))
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def received(cls, descriptor: int) -> Segment:
        """For the receiver, read-only; owns the descriptor. Raises ``OSError`` if it is not what ``create`` makes."""
        try:
            _check(descriptor)
            return cls(descriptor, np.frombuffer(mmap.mmap(descriptor, SEGMENT_BYTES, access=mmap.ACCESS_READ), np.uint8))
        except BaseException:
            os.close(descriptor)
            raise

    def offset_of(self, array: Array) -> int | None:
        """Where a C-contiguous array lies in the segment; None if it does not."""
        offset: int = array.__array_interface__["data"][0] - self._address
        return offset if 0 <= offset <= SEGMENT_BYTES - array.nbytes else None

    def close(self) -> None:
        """Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            self.memory = np.empty(0, np.uint8)


def _check(descriptor: int) -> None:
    if os.fstat(descriptor).st_size != SEGMENT_BYTES or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError("the peer's shared memory has another size or is not sealed")
