"""Retention of checkpoints: which ones to keep (`retained`), and which one is the best (`lowest_loss`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class SavedCheckpoint(NamedTuple):
    """A checkpoint in a directory; sorts from the oldest to the newest."""
    lineage: int                          # number of its run in the directory, see RunProgress
    step: int
    path: Path
    exploded: bool = False                # whether the loss had exploded
    val_loss: float | None = None         # nats per byte, if the step was evaluated


def lowest_loss(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the (oldest) checkpoint with the lowest validation loss; None if none was evaluated."""
    return min((one for one in saved if one.val_loss is not None), key=lambda one: one.val_loss, default=None)


def retained(saved: Sequence[SavedCheckpoint], keep_last: int, keep_best: bool) -> list[SavedCheckpoint]:
    """Choose which of a run's checkpoints (oldest first) to keep: the newest `keep_last`; the newest two that had not
    exploded; and, if `keep_best`, the one with the lowest validation loss. Two, because the update right after a sound
    loss may already have ruined the weights."""
    sound = [one for one in saved if not one.exploded]
    kept = [*saved[-keep_last:], *sound[-2:], *[lowest_loss(saved)] * keep_best]
    return [one for one in saved if one in kept]
