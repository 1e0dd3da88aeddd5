"""What varies by step, as a function of flags and progress."""

import math
from dataclasses import replace

import numpy as np
import pytest

import train
from data import Loader, mock_source
from preparing import source
from spider.run import RunProgress
from train import Flags, Schedule, lr_factor

FLAGS = Flags(warmup_steps=10, min_lr_fraction=0.1)
WSD = replace(FLAGS, schedule="wsd", wsd_decay_fraction=0.2)


@pytest.mark.parametrize("flags", (FLAGS, WSD), ids=("cosine", "wsd"))
def test_the_rate_warms_up_decays_and_ends_at_the_minimum(flags):
    factors = [lr_factor(step, 100, flags) for step in range(120)]
    assert factors[:11] == [pytest.approx((step + 1) / 11) for step in range(11)]
    assert factors[10:] == sorted(factors[10:], reverse=True)
    assert factors[100] == factors[119] == pytest.approx(0.1)


@pytest.mark.parametrize(
    "flags, step, horizon, factor",
    (
        (FLAGS, 55, 100, 0.55),  # half of the cosine
        (FLAGS, 11, 11, 0.1),  # one step after the warm-up
        (WSD, 80, 100, 1.0),
        (WSD, 91, 100, 0.1 + 0.9 * 0.5),
        (replace(WSD, wsd_decay_fraction=0.0), 119, 100, 1.0),
        (replace(FLAGS, warmup_steps=0), 0, 100, 1.0),
    ),
)
def test_the_rate_of_a_step(flags, step, horizon, factor):
    assert lr_factor(step, horizon, flags) == pytest.approx(factor)


def test_random_loops_are_poisson_and_a_function_of_seed_and_step():
    flags = Flags(random_loops=True, seed=3, n_loops=6)
    draws = [train.loops_of_step(flags, step) for step in range(2000)]
    assert draws == [train.loops_of_step(flags, step) for step in range(2000)]
    assert min(draws) >= 1 and abs(np.mean(draws) - 6) < 0.2 and abs(np.var(draws) - 6) < 0.6
    assert draws != [train.loops_of_step(replace(flags, seed=4), step) for step in range(2000)]
    assert {train.loops_of_step(Flags(n_loops=6), step) for step in range(9)} == {6}


def mixture(*parts: tuple[int, float]) -> Loader:
    """Return a loader of sequences of one byte; parts: the bytes and the weight of each source."""
    return Loader([source([0] * (size + 1), weight=weight) for size, weight in parts], 1, 0)


def test_halting_warms_up_over_an_eighth_of_the_horizon():
    schedule = Schedule(Flags(seq_len=1), mixture((100, 1.0)), horizon=32)
    warmups = [schedule.at(RunProgress(step=step)).halting_warmup for step in range(6)]
    assert warmups == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_dropout_begins_with_the_second_epoch_and_is_complete_in_the_eleventh():
    loader = mixture((20, 1.0))
    schedule = Schedule(Flags(seq_len=1, dropout=0.5), loader, horizon=13)
    windows = int(loader.windows[0])
    rates = [schedule.at(RunProgress(bytes_seen=e * windows)).dropout for e in range(13)]
    assert rates == pytest.approx([min(0.5, 0.05 * epoch) for epoch in range(13)])


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
    "passes, cleared", ((1.3, []), (1.6, [1]), (3.4, [1, 2]), (3.6, [1, 2, 3]))
)
def test_tables_are_cleared_as_an_epoch_begins_unless_less_than_half_of_it_is_left(passes, cleared):
    loader = Loader([mock_source(0)], 100, 0)
    targets = int(loader.targets[0])
    windows = int(loader.windows[0])
    flags = Flags(engram_reset=True, seq_len=100, target_tokens=int(passes * targets))
    begun = [epoch for epoch in (1, 2, 3) if epoch < passes]
    assert [e for e in begun if train.clears_tables(flags, loader, e * windows)] == cleared
    never = replace(flags, engram_reset=False, target_tokens=9 * targets)
    assert not train.clears_tables(never, loader, windows)


def test_tables_are_cleared_only_in_the_step_that_begins_an_epoch():
    loader = Loader([mock_source(0)], 100, 0)
    windows = int(loader.windows[0])
    flags = Flags(engram_reset=True, seq_len=100, target_tokens=10**9)
    schedule = Schedule(flags, loader, horizon=1000)
    for first, epoch, clears in ((windows - 1, 0, False), (windows, 0, True), (windows, 1, False)):
        progress = RunProgress(bytes_seen=first * 100, epoch=epoch)
        assert schedule.at(progress).clears_tables == clears


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
