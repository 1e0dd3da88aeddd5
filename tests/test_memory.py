"""Lookup memories: ends of words, addresses of Engram tables, matches in the document, votes on the
next byte."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import awake, documents, small_config, text
from spider.attention import ALL_ROWS
from spider.memory import EngramTable, Matches, MatchMemory, OutputEngram, shifted_bytes, word_ends
from spider.packing import Packing, document_cu_seqlens
from tokenizer import BOS_ID, EOS_ID, PAD_ID


@pytest.mark.parametrize(
    "given, ends",
    (
        (b"to be, or", b"__x__x___"),
        (b"self.x_1 = f(a2)\n\n  y", b"____x___x___x__x_____"),
        (b"  ,,", b"____"),
        ("gr\u00fc\u00df \u4f60\u597d".encode(), b"______x___x__"),
        (b"a", b"_"),
        ("\u0434\u0430\u00a0\u0438\u2026".encode(), b"____x___x__"),
    ),
)
def test_words_end_at_the_first_byte_that_is_not_part_of_a_word(given, ends):
    ids = torch.tensor(list(given))
    found = word_ends(shifted_bytes(ids, torch.arange(len(ids)), 2)).squeeze(0)
    assert "".join("x" if end else "_" for end in found) == ends.decode()


def test_an_engram_row_is_the_hash_of_the_last_n_bytes_modulo_the_tables_prime():
    table, ids = EngramTable((1, 3), 2, 50, 4), text(1, 20)[0]
    table.init_hash(7)
    address = table.addresses(shifted_bytes(ids, torch.arange(20), 3))
    multiplier, first = table.multiplier.tolist(), 0
    assert table.primes == (47, 43, 41, 37) and all(number % 2 for number in multiplier)
    for column, (order, prime) in enumerate(zip((1, 1, 3, 3), table.primes, strict=True)):
        for t in range(20):
            key = 0
            for k in range(order):  # in 64 bits, with the sign that torch's remainder takes
                key ^= (int(ids[t - k]) if t >= k else PAD_ID) * multiplier[k] & (1 << 64) - 1
            assert address[t, column] == first + (key - (key >> 63 << 64)) % prime
        first += prime


def context_of_bytes(part: list[int], t: int, n: int) -> list[int] | None:
    return part[t + 1 - n : t + 1] if t >= n - 1 else None


def context_of_words(part: list[int], t: int, n: int) -> list[int]:
    """Return the bytes up to t after the n-th last end of a word, PAD before the document."""
    ends = [
        s
        for s in range(t, max(t - 31, 0), -1)
        if part[s] not in {*b"ABCD"} and part[s - 1] in {*b"ABCD"}
    ]
    return (
        part[ends[n - 1] + 1 : t + 1] if len(ends) >= n else ([PAD_ID] * 31 + part)[t + 1 : t + 32]
    )


@pytest.mark.parametrize(
    "orders, words, occurrences",
    (((1,), (), 2), ((2, 3, 7), (1, 2), 4), ((4, 32), (3,), 3), ((), (1, 4), 2)),
)
def test_matches_are_the_ids_after_the_last_occurrences_in_the_same_document(
    orders, words, occurrences
):
    rows = torch.cat((text(2, 60, 3) % 4 + 65, documents(7, 2, 30, 21) % 3 + 65))
    if words:
        rows[rows == ord("B")], rows[1][rows[1] == ord("C")] = ord(" "), 0
        rows[0, 12:50] = ord("A")  # no word ends within as many bytes as are read
    rows[0, [9, 30]], rows[1, 4], rows[2, 6], rows[2, 20] = EOS_ID, PAD_ID, EOS_ID, BOS_ID
    ids, cu_seqlens = rows.flatten(), document_cu_seqlens(rows)
    packing = Packing.build(cu_seqlens, len(ids), 60, small_config(), torch.float32)
    memory = MatchMemory(orders, words, occurrences)
    memory.init_hash(0)
    found, all_followed = memory(
        ids, shifted_bytes(ids, packing.position, len(memory.multiplier)), packing.document
    )
    for begin, end in pairwise(cu_seqlens.tolist()):
        part = ids[begin:end].tolist()
        for t in range(len(part)):
            for j, n in enumerate((*orders, *words)):
                context = context_of_bytes if j < len(orders) else context_of_words
                here = context(part, t, n)
                before = [s for s in range(t) if here is not None and context(part, s, n) == here]
                followed = [part[s + 1] for s in before[::-1]]
                kind = 0 if len(before) < 2 else 256 if followed[0] == followed[1] else 512
                assert found[begin + t, j] == (
                    followed[0] + kind if before and followed[0] < 256 else 768
                )
                assert (
                    all_followed[begin + t, j].tolist()
                    == (followed + [-1] * occurrences)[:occurrences]
                )
    assert all(((low <= found) & (found < low + 256)).any() for low in (0, 512, 768))


@pytest.mark.parametrize("votes", (1, 3))
def test_votes_add_weights_to_the_logits_of_bytes_that_followed_the_newest_first(votes):
    """EOS, PAD and missing occurrences get no vote."""
    config = small_config(
        engram_votes=votes, engram_match_orders=(2, 4), engram_byte_orders=(), boundaries="words"
    )
    engram, generator = OutputEngram(config), torch.Generator().manual_seed(0)
    for parameter in engram.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(5, 32, generator=generator)
    followed = torch.tensor(
        [
            [[65, 66, 67], [65, 65, -1]],
            [[EOS_ID, 65, 66], [PAD_ID, 255, 256]],
            [[0, -1, -1], [-1, -1, -1]],
            [[7, 8, 8], [8, 7, 7]],
            [[255, 257, 1], [2, 3, 4]],
        ]
    )
    matches = Matches(torch.zeros(5, 2, dtype=torch.int64), followed)
    _, logits = engram(x, torch.zeros(32, 5, dtype=torch.int64), matches)
    weights = engram.votes(x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()).view(5, 2, votes)
    expected = torch.zeros(5, config.vocab_size)
    for row in range(5):
        for context in range(2):
            for vote in range(votes):
                if 0 <= (byte := int(followed[row, context, vote])) < 256:
                    expected[row, byte] += weights[row, context, vote]
    # of one vote each, the second row's are for sentinels alone
    assert (expected != 0).any(1).all() == (votes > 1)
    torch.testing.assert_close(logits, expected)


class Operations(TorchDispatchMode):
    """Collect the names of operations."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **kwargs or {})


def test_a_segments_memory_is_convolved_as_a_sum_over_its_taps_without_batched_products():
    """Beside a sum in float64; bmm with a batch of all segments would be a kernel that nothing
    fuses with."""
    model = awake(small_config())
    engram = next(layer.engram for layer in model.core.layers if layer.engram is not None)
    n, width = 20, model.config.hidden_size
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(n, width, generator=generator)
    position = torch.cat((torch.arange(12), torch.arange(8)))  # of two documents
    shifted = torch.randint(97, 123, (model.config.longest_order, n), generator=generator)
    h.requires_grad_()
    with Operations() as operations:
        recalled = engram.recall(shifted, position, torch.float32)
        out, scale = engram(h, recalled, ALL_ROWS, None)
        out.square().sum().backward()
    assert operations.names.isdisjoint({"bmm", "baddbmm"}) and "mm" in operations.names
    gate = engram.gate(h, recalled.key).double()
    convolved = torch.zeros(n, width, dtype=torch.float64)
    for tap, distance in enumerate((0, *engram.taps(model.config))):
        for i in range(n):
            if position[i] >= distance:
                convolved[i] += (
                    scale[i - distance].double()
                    * recalled.value[i - distance]
                    * engram.conv_weight[tap]
                )
    exact = h.double() + gate * recalled.value + F.silu(convolved)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
