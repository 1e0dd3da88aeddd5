"""A run in progress: its position and losses (`RunProgress`), metrics.jsonl (`Metrics`), signals
(`StopSignals`), wandb and the profiler."""

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from loguru import logger

from spider import errors, files
from spider.errors import Diverged, Stopped, UsageError
from spider.vocabulary import VOCAB_SIZE

# --------------------------------------------------------------------------------------------------
# Progress

RECENT = 64  # losses that a new one is judged by
SPIKE_AFTER = 20  # recent losses; with fewer, none is called a spike
SPIKE = 1.2  # relative to the largest recent loss
EXPLODED = 1.5  # relative to RunProgress.lowest_peak
EXPLODED_STEPS = 4  # steps in a row above that


class StepEvents(NamedTuple):
    """What the log says of a step beside its metrics."""

    spike: bool = False  # its loss is far above the recent ones
    begins_epoch: bool = False
    cleared: bool = False  # the Engram tables were cleared after it


@dataclass
class RunProgress:
    """Position and losses of a run; saved with every checkpoint."""

    step: int = 0  # optimizer steps done
    bytes_seen: int = 0  # training bytes consumed, PAD included
    epoch: int = 0  # epoch of the last step that was not skipped
    best_loss: float = math.inf  # lowest validation loss, nats per byte
    val_loss: float | None = None  # validation loss after the last step, if it was evaluated
    unimproved: int = 0  # last evaluations in a row that did not lower best_loss
    metrics: dict | None = None  # the last step's line of metrics.jsonl
    recent: list = field(default_factory=list)  # the last RECENT losses
    lowest_peak: float = math.inf  # the smallest max(recent) so far
    # the last EXPLODED_STEPS losses exceed EXPLODED * lowest_peak, or the last loss is above
    # ln(vocab_size) + 1
    exploded: bool = False
    skipped: int = 0  # last steps in a row that were not finite
    wandb: dict | None = None  # name and id of the wandb run
    n_loops: int = 1  # loops in training; may be more than the model was built for
    origin: str | None = None  # the real path that --resume named for the weights of step 0

    def record(
        self, numbers: dict, bytes_seen: int, epoch: int, cleared: bool = False
    ) -> StepEvents:
        """Record a completed step; return what the log says of it.

        cleared: the Engram tables were cleared after the step."""
        self.step += 1
        self.bytes_seen = bytes_seen
        self.val_loss = None
        self.metrics = dict(step=self.step, bytes_seen=bytes_seen, epoch=epoch, **numbers)
        if numbers["skipped"]:
            self.skipped += 1
            return StepEvents()
        self.skipped = 0
        begins = epoch > self.epoch
        self.epoch = epoch
        spike = self.watch(numbers["loss"])
        if cleared and not self.exploded:  # empty tables raise the next losses
            self.forget_recent()
        return StepEvents(spike, begins, cleared)

    def record_evaluation(self, numbers: Mapping[str, float], counts: bool):
        """Record an evaluation of the last step, with the step's metrics.

        numbers: what it found, `val_loss` among them. counts: whether --patience counts it, as the
        regular evaluations."""
        self.metrics = {**(self.metrics or {}), **numbers}
        loss = numbers["val_loss"]
        self.val_loss = loss if math.isfinite(loss) else None
        if counts:
            self.unimproved = 0 if loss < self.best_loss else self.unimproved + 1
        self.best_loss = min(self.best_loss, loss)

    @property
    def is_best(self) -> bool:
        """Return whether the last step was evaluated, with the lowest loss so far."""
        return self.val_loss is not None and self.val_loss == self.best_loss

    def out_of_patience(self, patience: int) -> bool:
        """Return whether --patience ends the run."""
        return 0 < patience <= self.unimproved

    def check_divergence(self, max_skipped: int):
        """Raise Diverged after --max_skipped steps in a row that were not finite. At a run's end
        one is too many: its weights are not those of its last step."""
        if self.skipped >= max_skipped:
            raise Diverged(
                f"no finite loss or gradient in the last steps ({self.skipped}), which changed no "
                f"weight: resume with a lower --lr or more --warmup_steps, and if no step is left, "
                f"with a larger --target_tokens"
            )

    def next_sequence(self, seq_len: int) -> int:
        """Return the index, from 0, of the next sequence of the data to train on."""
        return self.bytes_seen // seq_len

    def forget_recent(self):
        """Judge the next training losses afresh, since recent ones are not comparable with them."""
        self.recent = []
        self.lowest_peak = math.inf
        self.exploded = False

    def forget_losses(self, evaluations: bool):
        """Forget recent losses, since other flags or data change the loss.

        evaluations: forget the validation losses, too, since other bytes are evaluated."""
        self.forget_recent()
        self.skipped = 0
        self.unimproved = 0
        if evaluations:
            self.best_loss = math.inf
            self.val_loss = None

    def watch(self, loss: float) -> bool:
        """Note a finite loss; return whether it is a spike.

        It is judged by the largest of the recent losses, not by their mean, since documents may
        differ much from one another."""
        spike = len(self.recent) >= SPIKE_AFTER and loss > SPIKE * max(self.recent)
        self.recent = [*self.recent, loss][-RECENT:]
        stays_high = min(self.recent[-EXPLODED_STEPS:]) > EXPLODED * self.lowest_peak
        worse_than_guessing = loss > 1 + math.log(VOCAB_SIZE)
        self.exploded = stays_high or worse_than_guessing
        if len(self.recent) >= SPIKE_AFTER:
            self.lowest_peak = min(self.lowest_peak, max(self.recent))
        return spike


# --------------------------------------------------------------------------------------------------
# metrics.jsonl


def finite(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers by name, None for those that are not finite, since JSON has none."""
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in numbers.items()
    }


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each step in metrics.jsonl, None for numbers that were not finite.

    If there is no such file, yield nothing. Leave out all other lines, such as one that a kill cut
    short, or of another program."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            numbers: dict[str, Any] = {}
            with suppress(Exception):  # whatever such a line provokes
                numbers = finite(json.loads(line))
            if numbers.get("step") is not None:
                yield numbers


class Metrics:
    """Write metrics.jsonl, a line per step. If the disk is full, log that once, and write the lines
    later."""

    def __init__(self, path: Path, step: int):
        """Keep the lines before `step`; the run writes all further ones again."""
        with files.atomic_write(path) as file:
            for numbers in read_metrics(path):
                if numbers["step"] < step:
                    file.write(json.dumps(numbers) + "\n")
        self.path = path
        self.pending = b""  # lines that are not written yet
        self.lock = threading.Lock()  # the thread that saves checkpoints writes, too
        self.file = open(path, "ab", 0)

    def write(self, numbers: Mapping):
        """Write the line of a step; non-finite numbers become null."""
        with self.lock:
            is_retry = bool(self.pending)
            self.pending += json.dumps(finite(numbers)).encode() + b"\n"
        try:
            self._write_pending()
        except OSError as fault:
            if not is_retry:
                logger.error(f"METRICS NOT WRITTEN: {self.path}: {fault.strerror}; will retry")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def _write_pending(self):
        with self.lock:
            while self.pending:
                written = self.file.write(self.pending)
                self.pending = self.pending[written:]

    def sync(self):
        """Sync all lines to disk, or raise OSError; a checkpoint is renamed only after this."""
        self._write_pending()
        os.fsync(self.file.fileno())


# --------------------------------------------------------------------------------------------------
# Signals

# If ranks receive different ones, the exit status is that of the last one in this list.
STOPS = signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM
COPY_SECONDS = 2.0  # torchrun passes a signal on within milliseconds

Result = TypeVar("Result")


class StopSignals:
    """Handle the signals that ask a run to stop: SIGTERM, SIGINT (Ctrl-C), SIGHUP (a lost terminal)
    and SIGUSR1 (which Slurm users send before the time limit).

    The first signal sets `asked`: the run stops after the step, and saves. While `raises` is set
    (until the first step, and in `may_interrupt`), the first signal raises Stopped.

    The second signal ends the process at once, or does what the caller's handler does. Within
    COPY_SECONDS of the first signal it is ignored as a copy: torchrun and `timeout` repeat a signal
    that was sent to all processes, a closed terminal sends SIGHUP twice, systemd and Slurm send two
    kinds. SIGHUP and SIGUSR1 stay ignored if they were, as under nohup.

    Only the main thread can handle signals: a run in another thread says so, and does not.

    Several ranks stop after the same step: each adds its `vote` to the step's all-reduce, and the
    sum tells all of them the signal. A vote is 0 without a signal, else a power of ranks + 1 for
    each of STOPS. In a sum of votes, the digits in base ranks + 1 are how many ranks received each
    signal. In float64 the sum is exact for up to 9,000 ranks, in any order."""

    def __init__(self, ranks: int = 1):
        self.ranks = ranks
        self.asked: signal.Signals | None = None  # the first signal of this process
        self.agreed: signal.Signals | None = None  # the signal that stops all ranks
        self.vote = 0.0
        self.received = 0.0  # monotonic time of the first signal
        self.raises = True

    def __enter__(self):
        self.before: dict[int, Any] = {}  # handlers of the caller
        if threading.current_thread() is not threading.main_thread():
            errors.print_status(
                "this run is in a thread: no signal, nor Ctrl-C, stops it and saves"
            )
            return self
        for number in STOPS:
            handler = signal.getsignal(number)
            is_ignored = handler is signal.SIG_IGN and number in (signal.SIGHUP, signal.SIGUSR1)
            if not is_ignored:
                self.before[number] = handler
                signal.signal(number, self._ask)
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def agree(self, votes: float):
        """Stop for the last of STOPS that any rank received; votes: the sum over ranks."""
        for place, number in enumerate(STOPS):
            if votes >= (self.ranks + 1) ** place:
                self.agreed = number

    def may_interrupt(self, work: Callable[[], Result]) -> Result | None:
        """Do some work, unless a signal has arrived; a signal that arrives now ends it at once.
        Return the result, or None if there is none.

        Several ranks finish it together instead.

        This is no context manager: a signal could arrive between its body and its exit."""
        result = None
        try:
            self.raises = self.ranks == 1
            if self.agreed is None:
                result = work()
            self.raises = False
        except Stopped:
            self.raises = False
        return result

    def _ask(self, number: int, _):
        now = time.monotonic()
        if self.asked is None:
            self.received = now  # first, since another signal may interrupt this handler
            self.asked = signal.Signals(number)
            self.vote = float((self.ranks + 1) ** STOPS.index(self.asked))
            if self.ranks == 1:
                self.agreed = self.asked
            with suppress(OSError):  # stderr may be gone; the logger may be busy
                os.write(2, f"{self.asked.name}: stopping; repeat to quit at once\n".encode())
            if self.raises:
                raise Stopped("stopped before the first step")
        elif now > self.received + COPY_SECONDS:
            before = self.before[number]  # a notebook's ends the cell, and not the kernel
            signal.signal(number, before if callable(before) else signal.SIG_DFL)
            os.kill(os.getpid(), number)


# --------------------------------------------------------------------------------------------------
# wandb and the profiler


class WandbLogger:
    """The wandb run of --run. If wandb fails after its start, log the failure once, and continue
    without wandb."""

    def __init__(self, wandb_run):
        self.wandb_run = wandb_run  # None once it failed

    def log(self, metrics: Mapping, step: int):
        """Log a step's metrics."""
        self._try(lambda wandb_run: wandb_run.log(dict(metrics), step=step))

    def finish(self):
        """End the wandb run."""
        self._try(lambda wandb_run: wandb_run.finish())

    def _try(self, work: Callable):
        if self.wandb_run is None:
            return
        try:
            work(self.wandb_run)
        except Exception as fault:  # its service died, the disk is full, ...
            self.wandb_run = None
            logger.error(
                f"wandb failed: {type(fault).__name__}: {fault}; this run logs to metrics.jsonl "
                f"alone"
            )


def start_wandb(
    name: str | None,
    settings: Mapping[str, object],
    progress: RunProgress,
    closing: ExitStack,
    in_place: bool,
) -> WandbLogger | None:
    """Start the wandb run of --run, or return None.

    in_place: the run resumes in its own directory. Then the wandb run that its checkpoint recorded
    resumes, too, if it has this name; else a new one begins."""
    if not in_place:
        progress.wandb = None
    if not name:
        return None
    recorded = progress.wandb or {}
    run_id = recorded.get("id") if recorded.get("name") == name else None
    try:
        import wandb

        wandb_run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "spider",
            name=name,
            id=run_id,
            resume="allow",
            reinit="create_new",  # a run that the caller has open stays open
            config=dict(settings),
        )
    except Exception as fault:  # installation, settings, network or service
        raise UsageError(
            f"--run: wandb does not start: {fault}; WANDB_MODE=offline needs no network"
        ) from None
    progress.wandb = dict(name=name, id=wandb_run.id)
    wandb_logger = WandbLogger(wandb_run)
    closing.callback(wandb_logger.finish)
    return wandb_logger


def start_profiler(directory: Path, closing: ExitStack):
    """Profile steps 3 to 5 of this process; write trace.json for chrome://tracing or Perfetto."""
    from torch.profiler import profile, schedule

    profiler = profile(
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(directory / "trace.json")),
    )
    profiler.start()
    closing.callback(profiler.stop)
    return profiler
