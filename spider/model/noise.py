"""Randomness as a function of seed and position: neither ranks, micro-steps nor restarts change it.

Torch is imported in functions, since data.py draws its order without it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    Integers = TypeVar("Integers", Tensor, np.ndarray)


def step_seed(seed: int, step: int, purpose: str) -> int:
    """Derive a seed below 2^62 for one purpose in one step."""
    text = f"{purpose}:{seed}:{step}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def splitmix(start: Integers | int, index: Integers) -> Integers:
    """Return the numbers at `index` of the SplitMix64 sequence from `start` (Steele et al. 2014).

    Both are int64, tensors or NumPy arrays. Products wrap around, as in uint64. The algorithm's
    constants are written as the negative int64 with the same bits."""
    z = start + index * (0x9E3779B97F4A7C15 - (1 << 64))
    z = (z ^ _shift_right(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shift_right(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shift_right(z, 31)


def _shift_right(z: Integers, bits: int) -> Integers:
    """Shift int64 to the right as if it were unsigned: >> would repeat the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(number: Tensor) -> Tensor:
    """Map random int64 to fp32 in (0, 1), by their upper 24 bits."""
    upper_bits = (number >> 40) & 0xFFFFFF
    return (upper_bits.float() + 0.5) / (1 << 24)


def byte_noise(
    seed: int | Tensor | None, sequences: int, length: int, device: torch.device
) -> Tensor:
    """Return a random number per byte, int64 [sequences, length]; row i is a function of seed + i.

    Without a seed, torch's default generator draws them."""
    import torch

    if seed is None:
        return torch.randint(-1 << 63, (1 << 63) - 1, (sequences, length), device=device)
    seed_of_row = torch.arange(sequences, device=device) + seed
    start = splitmix(0, seed_of_row)[:, None]
    return splitmix(start, torch.arange(1, length + 1, device=device))


def apply_dropout(x: Tensor, rate: float, noise: Tensor | None, site: int) -> Tensor:
    """Apply dropout of a rate to x [n, D]; without noise return x.

    The mask is a function of the row's noise, int64 [n], the column and the site. A site is a place
    in the model, so that each has another mask."""
    if noise is None or not rate:
        return x
    import torch

    column = torch.arange(1, x.shape[1] + 1, device=x.device)
    salt = splitmix(site, column).int()
    # A 32-bit hash of row and column, in place: multiply, shift right and XOR, multiply.
    z = (noise.int()[:, None] ^ salt).mul_(0x2C1B3C6D)
    z = ((z >> 15) & 0x1FFFF).bitwise_xor_(z).mul_(0x297A2D39)
    threshold = round((rate - 0.5) * (1 << 32))  # a share `rate` of all int32 is below it
    return x * (z >= threshold) / (1 - rate)
