"""The progress of a run (`RunProgress`): position, losses, best evaluation, spikes, patience; saved in checkpoints."""

import math
from dataclasses import dataclass

import tokenizer


@dataclass
class RunProgress:
    """The position of a run and its losses so far; saved with every checkpoint."""
    step: int = 0                         # optimizer steps done
    bytes_seen: int = 0                   # training bytes consumed, PAD included
    epoch: int = 0                        # in which the last step began that was not skipped
    best_loss: float = math.inf           # lowest validation loss, nats per byte
    best_before_end: float | None = None  # the same without an evaluation that took place only since the run ended here
    val_loss: float | None = None         # validation loss after the last step, where there was an evaluation
    unimproved: int = 0                   # evaluations in a row, up to now, that did not lower best_loss
    average_loss: float | None = None     # of about the last 20 steps' losses
    last_loss: float | None = None
    noise: float = 0.0                    # mean difference of the loss from one step to the next, about as many
    lowest_average: float = math.inf
    skipped: int = 0                      # steps in a row, up to now, that were not finite
    owed: dict | None = None              # metrics of the last step while its evaluation is outstanding
    wandb: dict | None = None             # name and id of the run there
    n_loops: int = 1                      # loops that the run trains with, perhaps more than the model was made for
    lineage: int = 0                      # grows when a run starts over or goes back: the order of runs in a directory

    @property
    def written(self) -> int:
        """Return the number of steps whose line is in metrics.jsonl: all but one that is owed."""
        return self.step - (self.owed is not None)

    def record(self, numbers: dict, bytes_seen: int, epoch: int) -> bool:
        """Record a step that is done, whose line is owed until it is written; tell whether its loss is a spike."""
        self.step, self.bytes_seen, self.val_loss = self.step + 1, bytes_seen, None
        self.owed = dict(step=self.step, bytes_seen=bytes_seen, epoch=epoch, **numbers)
        self.skipped = self.skipped + 1 if numbers["skipped"] else 0
        self.epoch = self.epoch if self.skipped else epoch
        return not self.skipped and self.watch(numbers["loss"])

    def record_evaluation(self, loss: float, at_end: bool):
        """Record a validation loss; `at_end`: it was due only because the run ends here, and is no try in vain."""
        self.val_loss = loss if math.isfinite(loss) else None
        self.best_before_end = self.best_loss if at_end else None
        if not at_end:
            self.unimproved = 0 if loss < self.best_loss else self.unimproved + 1
        self.best_loss = min(self.best_loss, loss)

    @property
    def is_best(self) -> bool:
        """Tell whether the last step was followed by an evaluation, of the lowest loss so far."""
        return self.val_loss is not None and self.val_loss == self.best_loss

    def is_out_of_patience(self, patience: int) -> bool:
        """Tell whether so many evaluations in a row were in vain (0: never); not before what is owed is written."""
        return self.owed is None and 0 < patience <= self.unimproved

    def withdraw_end_evaluation(self, last_step: int) -> bool:
        """Withdraw the last evaluation where it was due only because the run ended here, and the run now continues;
        tell whether that was so."""
        past_end = self.step < last_step and self.best_before_end is not None
        if past_end:
            self.best_loss, self.best_before_end = self.best_before_end, None
        return past_end

    def expect_other_losses(self):
        """Forget the losses so far: those of other flags or data tell nothing about the next ones."""
        self.average_loss = self.last_loss = None
        self.noise, self.lowest_average, self.unimproved = 0.0, math.inf, 0

    def watch(self, loss: float) -> bool:
        """Add a finite loss to the averages; tell whether it is a spike: far above them by the measure of their
        noise."""
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
        """Tell whether the loss is no number, worse than knowing nothing, or half as high again as its average once
        was."""
        if self.skipped or self.average_loss is None:
            return self.skipped > 0
        loss = max(self.average_loss, self.last_loss - 4 * self.noise)
        return loss > 1.5 * self.lowest_average or self.last_loss > 1 + math.log(tokenizer.VOCAB_SIZE)


SPIKE_AFTER = 20                          # steps that the averages of the loss need before they say anything
