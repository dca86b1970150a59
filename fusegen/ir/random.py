"""Random bits as a pure function of a key and an element's index: Philox-4x32-10.

Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011). One call generates 128 bits from a 128-bit
counter and a 64-bit key; eight neighbouring elements share a call, 16 bits each. An element's bits depend only on the key, the
stream and its row-major index, not on the hardware or the launch configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DRAWS = 8
"""Elements that share a Philox call."""

BITS = 16
"""Random bits per element."""

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def random_bits(key: int, stream: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Returns the random bits of each element, as int16 of this shape.

    Args:
        key: 64 bits, of either sign.
        stream: the number of the random tensor among those with the same key.
    """
    count = 1
    for size in shape:
        count *= size
    calls = torch.arange(-(-count // DRAWS), dtype=torch.int64, device=device)
    words = philox([calls & _WORD, calls >> 32, torch.full_like(calls, stream), torch.zeros_like(calls)], key)
    halves = [half for word in words for half in (word & 0xFFFF, word >> BITS)]
    return torch.stack(halves, -1).flatten()[:count].to(torch.int16).reshape(tuple(shape))


def philox(counter: Sequence[Tensor], key: int) -> list[Tensor]:
    """Returns four 32-bit words in int64 for each counter of four words, the lowest first; the key has 64 bits of either sign."""
    a, b, c, d = counter
    low, high = key & _WORD, key >> 32 & _WORD
    for _ in range(_ROUNDS):
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # fit in 64 bits
        a, b, c, d = _high(right) ^ b ^ low, right & _WORD, _high(left) ^ d ^ high, left & _WORD
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    return [a, b, c, d]


def _high(product: Tensor) -> Tensor:
    return product >> 32 & _WORD
