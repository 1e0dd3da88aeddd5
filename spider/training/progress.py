"""The progress of a run (`RunProgress`), saved in checkpoints: position, losses, best evaluation, spikes, patience."""

import math
from dataclasses import dataclass

import tokenizer


@dataclass
class RunProgress:
    """Position and losses of a run; saved with every checkpoint."""
    step: int = 0                         # optimizer steps done
    bytes_seen: int = 0                   # training bytes consumed, PAD included
    epoch: int = 0                        # of the last step that was not skipped
    best_loss: float = math.inf           # lowest validation loss, nats per byte
    best_before_end: float | None = None  # best_loss before an evaluation that was done only because the run ended
    val_loss: float | None = None         # validation loss after the last step, if it was evaluated
    unimproved: int = 0                   # last evaluations in a row that did not lower best_loss
    average_loss: float | None = None     # moving average over about 20 steps
    last_loss: float | None = None
    noise: float = 0.0                    # mean absolute change of the loss per step, over about 20 steps
    lowest_average: float = math.inf
    skipped: int = 0                      # last steps in a row that were not finite
    owed: dict | None = None              # metrics of the last step while its evaluation is pending
    wandb: dict | None = None             # name and id of the wandb run
    n_loops: int = 1                      # loops in training; may be more than the model was built for
    lineage: int = 0                      # number of this run in its directory; new runs and rewinds increase it

    @property
    def written(self) -> int:
        """Return the number of steps in metrics.jsonl: all but a pending one."""
        return self.step - (self.owed is not None)

    def record(self, numbers: dict, bytes_seen: int, epoch: int) -> bool:
        """Record a completed step, whose metrics are pending until they are written; return whether its loss is a
        spike."""
        self.step, self.bytes_seen, self.val_loss = self.step + 1, bytes_seen, None
        self.owed = dict(step=self.step, bytes_seen=bytes_seen, epoch=epoch, **numbers)
        self.skipped = self.skipped + 1 if numbers["skipped"] else 0
        self.epoch = self.epoch if self.skipped else epoch
        return not self.skipped and self.watch(numbers["loss"])

    def record_evaluation(self, loss: float, at_end: bool):
        """Record a validation loss; `at_end`: evaluated only because the run ends, so that patience ignores it."""
        self.val_loss = loss if math.isfinite(loss) else None
        self.best_before_end = self.best_loss if at_end else None
        if not at_end:
            self.unimproved = 0 if loss < self.best_loss else self.unimproved + 1
        self.best_loss = min(self.best_loss, loss)

    @property
    def is_best(self) -> bool:
        """Return whether the last step was evaluated, with the lowest loss so far."""
        return self.val_loss is not None and self.val_loss == self.best_loss

    def is_out_of_patience(self, patience: int) -> bool:
        """Return whether `patience` evaluations in a row did not improve (0: never); False while metrics are
        pending."""
        return self.owed is None and 0 < patience <= self.unimproved

    def withdraw_end_evaluation(self, last_step: int) -> bool:
        """Discard the last evaluation if it was done only because the run ended, and the run now continues; return
        whether it was discarded."""
        past_end = self.step < last_step and self.best_before_end is not None
        if past_end:
            self.best_loss, self.best_before_end = self.best_before_end, None
        return past_end

    def expect_other_losses(self):
        """Reset the loss averages, since other flags or data change the loss."""
        self.average_loss = self.last_loss = None
        self.noise, self.lowest_average, self.unimproved = 0.0, math.inf, 0

    def watch(self, loss: float) -> bool:
        """Update the averages with a finite loss; return whether it is a spike, relative to average and noise."""
        if self.average_loss is None:
            self.average_loss = self.last_loss = loss
        spike = self.step > SPIKE_AFTER and loss > self.average_loss + max(5 * self.noise, 0.2 * self.average_loss)
        self.average_loss += 0.05 * (loss - self.average_loss)
        self.noise += 0.05 * (abs(loss - self.last_loss) - self.noise)
        self.last_loss = loss
        self.lowest_average = min(self.lowest_average, self.average_loss)
        return spike

    @property
    def exploded(self) -> bool:
        """Return whether the loss is not finite, worse than a uniform guess by a nat, or 1.5 times its lowest
        average."""
        if self.skipped or self.average_loss is None:
            return self.skipped > 0
        loss = max(self.average_loss, self.last_loss - 4 * self.noise)
        return loss > 1.5 * self.lowest_average or self.last_loss > 1 + math.log(tokenizer.VOCAB_SIZE)


SPIKE_AFTER = 20                          # steps before the averages are meaningful
