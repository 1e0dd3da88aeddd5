"""Values and bytes that nobody meant, for tests of bad input."""

import random

JUNK = [None, True, -1, 0, 1.5, 1e300, 10 ** 30, "", "x", "\ud800", "../x.bin", "a\nb\x00", [], {}, [[]], [None],
        {"a": 1}]


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Some bytes with one to four flipped, overwritten, deleted, doubled, or cut off."""
    raw = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 4))):
        i = rng.randrange(len(raw))
        match rng.randrange(5):
            case 0: raw[i] ^= 1 << rng.randrange(8)
            case 1: raw[i] = rng.randrange(256)
            case 2: del raw[i:i + rng.randrange(1, 20)]
            case 3: raw[i:i] = raw[i:i + rng.randrange(1, 20)]
            case 4: del raw[i + 1:]
        raw = raw or bytearray(b"x")
    return bytes(raw)
