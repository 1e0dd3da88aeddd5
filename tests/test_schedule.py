"""What varies by step, as a function of flags and progress."""

import math
from dataclasses import replace

import pytest

import train
from conftest import settled
from data import Loader
from preparing import source
from spider.run import RunProgress
from train import Flags, Schedule, lr_factor

FLAGS = Flags(warmup_steps=10, min_lr_fraction=0.1)
WSD = replace(FLAGS, schedule="wsd", wsd_decay_fraction=0.2)


@pytest.mark.parametrize(
    "flags, step, horizon, factor",
    (
        (FLAGS, 55, 100, 0.55),  # half of the cosine
        (FLAGS, 10, 10, 1.0),
        (FLAGS, 11, 11, 0.1),  # one step after the warm-up
        (WSD, 80, 100, 1.0),
        (WSD, 91, 100, 0.1 + 0.9 * 0.5),
        (replace(WSD, wsd_decay_fraction=0.0), 119, 100, 1.0),
        (replace(FLAGS, warmup_steps=0), 0, 100, 1.0),
    ),
)
def test_the_rate_of_a_step(flags, step, horizon, factor):
    assert lr_factor(step, horizon, flags) == pytest.approx(factor)


def test_each_schedule_has_rates_of_its_own_and_another_name_is_refused():
    names = train.SPECS["schedule"].options["choices"]
    rates = {lr_factor(70, 100, replace(FLAGS, schedule=name)) for name in names}
    assert len(rates) == len(names)
    with pytest.raises(ValueError, match="'linear' has no rates"):
        lr_factor(70, 100, replace(FLAGS, schedule="linear"))


def mixture(*parts: tuple[int, float]) -> Loader:
    """Return a loader of sequences of one byte; parts: the bytes and the weight of each source."""
    return Loader([source([0] * (size + 1), weight=weight) for size, weight in parts], 1, 0)


def test_halting_warms_up_over_an_eighth_of_the_horizon():
    schedule = Schedule(Flags(seq_len=1), mixture((100, 1.0)), horizon=32)
    warmups = [schedule.at(RunProgress(step=step)).halting_warmup for step in range(6)]
    assert warmups == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_dropout_of_a_mixture_follows_the_epochs_of_its_sources():
    loader = mixture((7000, 0.7), (300, 0.3))

    def first_of_epoch(epoch: int) -> int:
        """Return the first sequence of an epoch of the second source, counted from 0."""
        return next(g for g in range(10_000) if loader.epochs(g)[1] == epoch)

    second = first_of_epoch(1)
    eighth = first_of_epoch(7)
    assert 700 < second < 1400  # its share of the first sequences is not exactly 0.3
    expected = {
        0: 0,
        second - 1: 0,
        second: 0.5 * 0.3 * 0.1,
        eighth: 0.5 * 0.3 * 0.7,
        10_000: 0.5 * (0.7 * 0.1 + 0.3),
        10**6: 0.5,
    }
    for first, rate in expected.items():
        assert train.dropout_at(Flags(dropout=0.5), loader, first) == pytest.approx(rate)


@pytest.mark.parametrize(
    "target_tokens, first, epoch, clears",
    (
        (1500, 99, 0, False),
        (1500, 100, 0, True),
        (1499, 100, 0, False),
        (1500, 100, 1, False),
        (3500, 300, 2, True),
        (3499, 300, 2, False),
    ),
)
def test_tables_are_cleared_in_the_step_that_begins_an_epoch_if_half_of_it_is_left(
    target_tokens, first, epoch, clears
):
    """An epoch has 100 sequences of 10 bytes."""
    flags = Flags(engram_reset=True, seq_len=10, target_tokens=target_tokens)
    schedule = Schedule(flags, Loader([source([0] * 1001)], 10, 0), horizon=1000)
    progress = RunProgress(bytes_seen=10 * first, epoch=epoch)
    assert schedule.at(progress).clears_tables == clears


@pytest.mark.parametrize("target_tokens, warnings", ((4000, 0), (4001, 1)))
def test_more_than_twenty_epochs_of_a_source_are_a_warning(target_tokens, warnings):
    argv = f"--model tiny --seq_len 2 --warmup_steps 0 --target_tokens {target_tokens}"
    plan = settled(*argv.split())
    loader = mixture((1000, 0.5), (100, 0.5))
    assert len(train.horizon_warnings(plan, loader, plan.horizon)) == warnings


def cleared_at(loader: Loader, target_tokens: int) -> list[int]:
    """Return the first sequence of each epoch for which tables are cleared, of 5,000 sequences."""
    flags = Flags(engram_reset=True, target_tokens=target_tokens, seq_len=1)
    epochs = [loader.epoch(g) for g in range(5000)]
    begun = [g for g in range(1, 5000) if epochs[g] > epochs[g - 1]]
    return [g for g in begun if train.clears_tables(flags, loader, g)]


def test_tables_of_a_mixture_are_cleared_once_a_pass_over_all_of_it():
    equal = mixture((500, 0.5), (500, 0.5))
    cleared = cleared_at(equal, 5000)
    assert len(cleared) == 4
    for times, first in enumerate(cleared, 1):
        assert math.isclose(first, 1000 * times, abs_tol=100)
    assert len(cleared_at(equal, 4650)) == 4 and len(cleared_at(equal, 4350)) == 3
    small_source_read_five_times = mixture((100_000, 0.9), (100, 0.1))
    assert cleared_at(small_source_read_five_times, 5000) == []
