"""The plan of a run: its batch."""

import pytest

import train
from spider.errors import UsageError
from train import parse_args


@pytest.mark.parametrize("ranks, flags, wanted", (
    (2, ("--global_batch", "4096"), 16), (1, ("--global_batch", "4096"), 32), (3, ("--grad_accum", "5"), 5),
    (2, ("--global_batch", "4096", "--grad_accum", "16"), 16)))
def test_the_batch_of_all_ranks_settles_the_micro_steps_or_the_other_way_round(ranks, flags, wanted):
    args = parse_args(["--micro_batch", "4", "--seq_len", "32", *flags])
    batch = train.resolve_batch(vars(args), args.given, ranks)
    assert batch.grad_accum == wanted and batch.bytes == wanted * ranks * 128


@pytest.mark.parametrize("ranks, flags, words", (
    (3, ("--global_batch", "4096"), "not a multiple of a micro-step.s 384"),
    (2, ("--global_batch", "4096", "--grad_accum", "4"), "--grad_accum: 4 makes 1,024 bytes a step on 2 ranks")))
def test_a_batch_that_cannot_be_or_contradicts_is_one_line(ranks, flags, words):
    with pytest.raises(UsageError, match=words):
        args = parse_args(["--micro_batch", "4", "--seq_len", "32", *flags])
        train.resolve_batch(vars(args), args.given, ranks)
