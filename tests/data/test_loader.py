"""The order of the sequences: each target once an epoch, mixtures in their shares, the same on any ranks."""

import hashlib
from operator import mul

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bad_data import source
from spider import errors
from spider.data.loader import BLOCK, Loader, key, permute, shares, validation_sets
from tokenizer import PAD_ID


@given(st.integers(1, 3000), st.integers(0, 2 ** 64 - 1))
@settings(max_examples=60, deadline=None)
def test_the_permutation_is_a_bijection(n, seed):
    index = np.arange(n)
    keys = key(seed, np.zeros(n, int))
    assert sorted(permute(index, n, keys)) == list(index)


def test_permutations_scatter_and_do_not_resemble_each_other():
    index = np.arange(1000)
    orders = [permute(index, 1000, key(seed, 0 * index)) for seed in range(20)]
    for order, other in zip(orders, orders[1:]):
        assert 280 < np.abs(np.diff(order)).mean() < 390     # of a random order: 333
        assert (order == other).sum() < 9                    # on average one place agrees
    assert np.allclose(np.mean(orders, 0).mean(), 499.5) and 50 < np.mean(orders, 0).std() < 80   # 289 / sqrt(20)


def test_each_index_is_permuted_under_its_own_key_and_size():
    sizes, keys = np.array([10, 1000, 10, 7]), key(3, np.array([0, 1, 2, 3]))
    together = permute(np.array([4, 4, 4, 4]), sizes, keys)
    alone = [permute(np.array([4]), int(n), keys[i:i + 1])[0] for i, n in enumerate(sizes)]
    assert list(together) == alone


@given(st.data(), st.integers(1, 255), st.integers(0, 3), st.integers(0, 2 ** 63))
@settings(max_examples=150, deadline=None)
def test_every_epoch_covers_each_target_exactly_once(draw, targets, epoch, seed):
    seq_len = draw.draw(st.integers(1, targets))
    loader, n = Loader([source(range(targets + 1))], seq_len, seed), -(-targets // seq_len)
    assert [loader.epoch(g) for g in (n * epoch, n * epoch + n - 1)] == [epoch, epoch]
    ids, labels = loader.rows(np.arange(n * epoch, n * epoch + n))
    assert ids.shape == labels.shape == (n, seq_len) and ids.dtype == labels.dtype == torch.int64
    counted = labels != -100
    assert sorted(labels[counted].tolist()) == list(range(1, targets + 1))
    assert (ids[counted] == labels[counted] - 1).all() and (ids[~counted] == PAD_ID).all()
    assert (counted[:, 1:] <= counted[:, :-1]).all()          # a short window is filled at its end


def test_epochs_differ_in_order_and_cut():
    loader, n = Loader([source(range(251))], 16, 1), 16
    epochs = [loader.rows(np.arange(n) + n * epoch)[1][:, 0].tolist() for epoch in range(8)]
    assert len({tuple(firsts) for firsts in epochs}) == 8 and len({frozenset(firsts) for firsts in epochs}) > 3
    even = Loader([source(range(241))], 16, 1)           # windows fit: only the order differs
    epochs = [even.rows(np.arange(15) + 15 * epoch)[1][:, 0].tolist() for epoch in range(8)]
    assert len({tuple(firsts) for firsts in epochs}) == 8 and len({frozenset(firsts) for firsts in epochs}) == 1
    assert Loader([source(range(251))], 16, 2).rows(np.arange(n))[1][:, 0].tolist() != epochs[0]


def test_the_order_of_a_single_source_is_that_of_every_version():
    """Two stretches of 64 sequences, so that checkpoints of runs go on with the bytes that come next."""
    loader = Loader([source(range(251))], 16, 1)
    for first, digest in ((0, "e77f9ec93055275e"), (25_000, "f779e3482e77c273")):
        ids, labels = loader.rows(np.arange(first, first + 64))
        assert hashlib.sha256(ids.numpy().tobytes() + labels.numpy().tobytes()).hexdigest().startswith(digest)


@pytest.mark.parametrize("first", (30, BLOCK - 7))
@pytest.mark.parametrize("ranks, micro_batch, grad_accum", [(1, 16, 1), (1, 4, 4), (2, 8, 1), (2, 1, 8), (8, 2, 1)])
def test_the_global_batch_is_the_same_on_any_ranks_and_micro_steps(ranks, micro_batch, grad_accum, first):
    sources = [source(range(200)), source(range(50, 250), name="t", weight=0.5)]
    loader = Loader(sources, 8, 5)
    parts = [loader.micro_batch(first, m, micro_batch, rank, ranks) for m in range(grad_accum) for rank in range(ranks)]
    ids, labels, g = (torch.cat(part) for part in zip(*parts))
    assert g.tolist() == list(range(first, first + 16)) and g.dtype == torch.int64
    assert all(torch.equal(*pair) for pair in zip((ids, labels), loader.rows(np.arange(first, first + 16))))


def test_targets_that_are_pad_do_not_count():
    ids, labels = Loader([source([1, 2, PAD_ID, 3, PAD_ID])], 4, 0).rows(np.arange(1))
    assert ids.tolist() == [[1, 2, PAD_ID, 3]] and labels.tolist() == [[2, -100, 3, -100]]


def test_sources_have_their_exact_shares_in_every_block_and_their_own_epochs():
    sources = [source([200] * 5000, weight=7.0), source(range(101), name="t", weight=3.0)]
    loader, block = Loader(sources, 1, 4), np.arange(BLOCK)
    orders = []
    for number in (0, 3):
        labels = loader.rows(number * BLOCK + block)[1].flatten()
        assert torch.bincount(labels, minlength=201)[1:].tolist() == [30] * 100 + [0] * 99 + [7000]
        assert 0.6 < (labels[:2000] == 200).float().mean() < 0.8
        orders.append(labels.tolist())
    assert [label == 200 for label in orders[0]] != [label == 200 for label in orders[1]]
    assert orders[0] == Loader(sources, 1, 4).rows(block)[1].flatten().tolist()
    assert orders[0] != Loader(sources, 1, 5).rows(block)[1].flatten().tolist()
    passes = [loader.epochs(g).tolist() for g in (0, 1, 10_000, 20_000)]          # of 4,999 windows and of 100
    assert passes == [[0, 0], [0, 0], [1, 30], [2, 60]] and loader.epoch(20_000) == int(0.7 * 2 + 0.3 * 60)
    epochs = [loader.epoch(g) for g in range(0, 25_000, 50)]
    assert epochs == sorted(epochs) and epochs[0] == 0


MIXTURES = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 9)), min_size=2, max_size=3)  # targets, weight


@given(MIXTURES, st.data(), st.integers(20, 300), st.integers(0, 2 ** 63))
@settings(max_examples=60, deadline=None)
def test_a_mixture_reads_each_source_to_its_end_before_it_begins_it_again(mixture, draw, block, seed):
    seq_len, count = draw.draw(st.integers(1, min(targets for targets, _ in mixture))), 600
    sources = [source(range(81 * k, 81 * k + targets + 1), name=str(k), weight=weight)
               for k, (targets, weight) in enumerate(mixture)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spider.data.loader.BLOCK", block)
        loader = Loader(sources, seq_len, seed)
        rows = loader.rows(np.arange(count))
        labels = [row[row != -100].tolist() for row in rows[1]]
        owners, windows = [row[0] // 81 for row in labels], [-(-targets // seq_len) for targets, _ in mixture]
        for k, (targets, _) in enumerate(mixture):
            own = [row for row, owner in zip(labels, owners) if owner == k]
            for start in range(0, len(own), windows[k]):
                read = sorted(label for row in own[start:start + windows[k]] for label in row)
                whole = list(range(81 * k + 1, 81 * k + targets + 1))
                assert read == whole if start + windows[k] <= len(own) else len({*read}) == len(read)
        for g in range(0, count, 23):                         # so often was each one read to its end before
            passes = [owners[:g].count(k) // windows[k] for k in range(len(mixture))]
            assert loader.epochs(g).tolist() == passes
            assert loader.epoch(g) == sum(map(mul, loader.counts.tolist(), passes)) // block
        first = draw.draw(st.integers(0, count - 1))          # and another process goes on anywhere
        again = Loader(sources, seq_len, seed).micro_batch(first, 0, count - first)
        assert torch.equal(again[0], rows[0][first:]) and torch.equal(again[1], rows[1][first:])


def test_shares_go_by_largest_remainder():
    assert shares([1, 2], 10_000) == [3333, 6667] and shares([1, 1, 1], 10_000) == [3334, 3333, 3333]
    assert shares([1e-9, 1], 100) == [0, 100] and shares([0.7, 0.3], 0) == [0, 0]


def validation_targets(sources, seq_len: int, tokens: int) -> dict[str, list[int]]:
    """Return the targets that each source validates with."""
    return {name: labels[labels != -100].tolist()
            for name, (_, labels) in validation_sets(sources, seq_len, tokens).items()}


def test_validation_sets_hold_the_first_targets_shared_by_weight():
    a, b = source(range(9), range(0, 50), "a", 3.0), source(range(9), range(100, 106), "b", 1.0)
    ids, labels = validation_sets([a], 4, 10)["a"]
    assert labels.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, -100, -100]]
    assert ids.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, PAD_ID, PAD_ID]]
    shared = dict(a=[*range(1, 13)], b=[*range(101, 105)])
    assert validation_targets([a, b], 4, 16) == shared
    assert validation_targets([a, b], 7, 16) == shared    # the cut does not change the bytes
    assert validation_targets([a, b], 4, 1000) == dict(a=[*range(1, 50)], b=[*range(101, 106)])  # no more than there is


def test_validation_sets_stand_in_the_order_of_the_sources_without_those_that_have_no_target():
    a, b, c, none = (source(range(9), val, name, weight) for name, val, weight in (
        ("a", range(50), 3.0), ("b", range(100, 106), 1.0), ("c", range(200, 203), 1e-3), ("none", [], 1.0)))
    for sources in ([a], [a, b], [b, none, a], [c, a], [a, none]):
        for seq_len, tokens in ((4, 16), (7, 16), (4, 1000), (5, 1)):
            found = validation_targets(sources, seq_len, tokens)
            assert [*found] == [s.name for s in sources if s.name in found] and "none" not in found
            assert 0 < sum(map(len, found.values())) <= tokens and all(found.values())
            for s in sources:
                assert {*found.get(s.name, ())} <= {*(s.val.read(0, len(s.val)).tolist() if len(s.val) else ())}


@pytest.mark.parametrize("val, tokens", [([], 10), ([1], 10), ([1, 2], 0)])
def test_validation_without_a_byte_is_refused(val, tokens):
    with pytest.raises(errors.DataError, match="s: no validation data"):
        validation_sets([source([1, 2], val)], 4, tokens)


@pytest.mark.parametrize("sources, said", [
    ([source(range(64))], "s: a sequence of 64 bytes is longer than the data (63 bytes): lower --seq_len"),
    ([source([])], "s: a sequence of 64 bytes is longer than the data (0 bytes): lower --seq_len"),
    ([source(range(99)), source(range(99), name="t", weight=1e-5)], "t: weight 1e-05 is less than one sequence"),
])
def test_sources_that_cannot_be_drawn_from_are_refused(sources, said):
    with pytest.raises(errors.DataError) as fault:
        Loader(sources, 64, 0)
    assert str(fault.value).startswith(said)
    Loader([source(range(65))], 64, 0)
