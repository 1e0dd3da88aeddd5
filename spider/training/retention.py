"""Retention: which of a run's checkpoints are kept (`retained`), and which of them is the best (`lowest_loss`)."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class SavedCheckpoint(NamedTuple):
    """A checkpoint in a directory; they sort from the oldest to the newest."""
    lineage: int                          # of its run: runs of a directory that started over or went back, in order
    step: int
    path: Path
    exploded: bool = False                # the loss had exploded before it
    val_loss: float | None = None         # nats per byte, where an evaluation followed its step


def lowest_loss(saved: Sequence[SavedCheckpoint]) -> SavedCheckpoint | None:
    """Return the checkpoint of the lowest validation loss, the oldest of several; None where none was evaluated."""
    return min((one for one in saved if one.val_loss is not None), key=lambda one: one.val_loss, default=None)


def retained(saved: Sequence[SavedCheckpoint], keep_last: int, keep_best: bool) -> list[SavedCheckpoint]:
    """Choose which of a run's checkpoints, oldest first, are kept: the newest `keep_last` of them; the newest two that
    had not exploded (two, since the update after the last such loss may be the one that ruined the weights); and, if
    `keep_best`, the one of the lowest validation loss."""
    sound = [one for one in saved if not one.exploded]
    kept = [*saved[-keep_last:], *sound[-2:], *[lowest_loss(saved)] * keep_best]
    return [one for one in saved if one in kept]
