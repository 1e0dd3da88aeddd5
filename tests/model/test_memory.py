"""Lookup memories: matches in the document, votes on the next byte, the gate."""

from itertools import pairwise, product
from types import SimpleNamespace

import pytest
import torch

from conftest import documents, small_config, text
from spider.model.contexts import PastBytes
from spider.model.memory import Matches, MatchMemory, OutputEngram, _Similarity
from spider.model.packing import Packing, document_cu_seqlens
from tokenizer import BOS_ID, EOS_ID, PAD_ID


def context_of(name: str, document: list[int], t: int) -> list[int] | None:
    """Return the bytes of a context at t, newest first, or None if the context starts before the
    document. Words consist of A to C."""
    word = {*b"ABC"}
    past = document[t::-1]
    ends = [k - 1 for k in range(t) if past[k] not in word and past[k + 1] in word and k < 31]
    newlines = [k for k in range(t + 1) if past[k] == ord("\n")]
    first, _, last = name.removeprefix("word").rpartition("-")
    added = []
    if name == "above":
        start = max(newlines[1] - newlines[0] - 2, 0) if len(newlines) > 1 else 0
        stop = start + 3
        added = past[:1]
    elif name.startswith("word"):
        ends = [-1, *ends, *[30] * 20]
        start = ends[int(first or 0)] + 1
        stop = ends[int(last)] + 1
    else:
        start = int(first or 0)
        stop = int(last)
    return None if stop > t + 1 else past[start:stop] + added


def sequences_with_repeats() -> torch.Tensor:
    """Return sequences [3, 60] of few different bytes, in documents that end in different ways."""
    sequences = torch.cat((text(2, 60, 3) % 4 + 65, documents(7, 2, 30, 21) % 3 + 65))
    sequences[sequences == ord("D")] = 255
    sequences[sequences == ord("B")] = ord("\n")
    sequences[1][sequences[1] == ord("C")] = 0
    sequences[1, 40:47] = torch.tensor(list(b"A\n\nA\n\nC"))  # earlier lines of one byte
    sequences[0, 12:50] = ord("A")  # no word ends within the 31 bytes that are read
    sequences[0, 9] = EOS_ID
    sequences[1, 4] = PAD_ID
    sequences[2, 6] = EOS_ID
    sequences[2, 20] = BOS_ID
    return sequences


@pytest.mark.parametrize(
    "contexts, occurrences",
    (
        (("1",), 2),
        (("2", "3", "7", "word1", "word2"), 4),
        (("4", "32", "word3"), 3),
        (("word1", "word4"), 2),
        (("1-4", "2-3", "word1-2", "word1-3", "above"), 2),
    ),
    ids=str,
)
def test_matches_are_the_ids_after_the_last_occurrences_in_the_document(contexts, occurrences):
    sequences = sequences_with_repeats()
    ids = sequences.flatten()
    cu_seqlens = document_cu_seqlens(sequences)
    packing = Packing.build(cu_seqlens, len(ids), 60, small_config(), torch.float32)
    memory = MatchMemory(contexts, occurrences)
    memory.init_hash(0)
    past = PastBytes(ids, packing.position, torch.arange(len(ids)))
    matches = memory(past, packing.document)

    for begin, end in pairwise(cu_seqlens.tolist()):
        document = ids[begin:end].tolist()
        for column, name in enumerate(contexts):
            earlier = []  # the contexts of earlier bytes
            for t in range(len(document)):
                context = context_of(name, document, t)
                same = [s for s in range(t) if context is not None and earlier[s] == context]
                followed = [document[s + 1] for s in reversed(same)]
                earlier.append(context)
                if not followed or followed[0] >= 256:
                    row = 768
                elif len(followed) == 1:
                    row = followed[0]
                else:
                    row = followed[0] + (256 if followed[0] == followed[1] else 512)
                padded = (followed + [-1] * occurrences)[:occurrences]
                assert matches.row[begin + t, column] == row
                assert matches.next_ids[begin + t, column].tolist() == padded
                assert matches.age[begin + t, column] == (t - same[-1] if same else 0)
    for first_row in (0, 512, 768):  # each group of rows occurs
        assert ((first_row <= matches.row) & (matches.row < first_row + 256)).any()


def test_votes_add_weights_to_the_logits_of_matched_next_bytes():
    """The newest two occurrences vote, but never for EOS, PAD or a missing occurrence."""
    votes = 2
    config = small_config(
        engram_votes=votes,
        engram_vote_ages=True,
        engram_match_contexts=("2", "4"),
        engram_byte_contexts=(),
    )
    engram = OutputEngram(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in engram.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x = torch.randn(3, 32, generator=generator)
    followed = torch.tensor(
        [
            [[65, 66, 67], [65, 65, -1]],
            [[EOS_ID, 65, 66], [PAD_ID, 255, 256]],
            [[0, -1, -1], [-1, -1, -1]],
        ]
    )
    age = torch.arange(6).view(3, 2)
    matches = Matches(torch.zeros(3, 2, dtype=torch.int64), followed, age)
    _, logits = engram(x, SimpleNamespace(input_ids=x, matches=matches))

    normed = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    seen = torch.cat((normed, (1 + age).log() / 4, torch.zeros(3, 30)), dim=1)
    weights = engram.votes(seen).view(3, 2, votes)
    expected = torch.zeros(3, config.vocab_size)
    for token, context, vote in product(range(3), range(2), range(votes)):
        byte = int(followed[token, context, vote])
        if 0 <= byte < 256:
            expected[token, byte] += weights[token, context, vote]
    torch.testing.assert_close(logits, expected)


def test_gate_backward_is_the_derivative():
    inputs = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(_Similarity.apply, inputs)
