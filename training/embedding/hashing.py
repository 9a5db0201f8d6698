"""The hash of a sign: decides its server, its buckets, its place in a batch and its first values.

Checkpoints depend on it: never change it. It is a bijection of 64 bits, so two signs never collide in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from training.embedding.jit import inlined

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix_reference(value: Any) -> Any:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): uint64 scalar or array to the same. ``mix`` is its compiled form."""
    value = (value ^ (value >> _S30)) * _M1
    value = (value ^ (value >> _S27)) * _M2
    return value ^ (value >> _S31)


mix = inlined(mix_reference)


@inlined
def sign_hash(sign: Any) -> Any:
    """64 mixed bits of a sign."""
    return mix(sign + GOLDEN)
