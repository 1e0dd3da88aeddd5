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
    digest = hashlib.blake2b(f"{purpose}:{seed}:{step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def splitmix(start: Integers | int, index: Integers) -> Integers:
    """Return the numbers at `index` of the SplitMix64 sequence from `start`.

    Both are int64, tensors or NumPy arrays; products wrap around."""
    z = start + index * (0x9E3779B97F4A7C15 - (1 << 64))
    for shift, factor in (
        (30, 0xBF58476D1CE4E5B9 - (1 << 64)),
        (27, 0x94D049BB133111EB - (1 << 64)),
    ):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def uniform(number: Tensor) -> Tensor:
    """Map random int64 to fp32 in (0, 1)."""
    return (((number >> 40) & 0xFFFFFF).float() + 0.5) / (1 << 24)


def byte_noise(
    seed: int | Tensor | None, sequences: int, length: int, device: torch.device
) -> Tensor:
    """Return a random number per byte, int64 [sequences, length]; row i is a function of seed + i.

    Without a seed, torch's default generator draws them."""
    import torch

    if seed is None:
        return torch.randint(-1 << 63, (1 << 63) - 1, (sequences, length), device=device)
    row = splitmix(0, torch.arange(sequences, device=device) + seed)
    return splitmix(row[:, None], torch.arange(1, length + 1, device=device))


def dropped(x: Tensor, rate: float, noise: Tensor | None, site: int) -> Tensor:
    """Apply dropout of a rate to x [n, D]; without noise return x. The mask is a function of the
    row's noise, int64 [n], and of the site."""
    if noise is None or not rate:
        return x
    import torch

    salt = splitmix(site, torch.arange(1, x.shape[1] + 1, device=x.device)).int()
    z = (noise.int()[:, None] ^ salt).mul_(0x2C1B3C6D)  # a 32-bit hash
    z = ((z >> 15) & 0x1FFFF).bitwise_xor_(z).mul_(0x297A2D39)
    return x * (z >= round((rate - 0.5) * (1 << 32))) / (1 - rate)
