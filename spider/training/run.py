"""The parts of a run in progress: position and losses (`RunProgress`), metrics.jsonl (`Metrics`),
signals (`StopSignals`), wandb (`WandbLogger`) and the profiler."""

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

RECENT = 64  # number of recent losses to compare a new loss with
SPIKE_AFTER = 20  # with fewer recent losses, no loss counts as a spike
SPIKE = 1.2  # relative to the largest recent loss
EXPLODED = 1.5  # relative to RunProgress.lowest_peak
EXPLODED_STEPS = 4  # consecutive losses above EXPLODED * lowest_peak


class StepEvents(NamedTuple):
    """Events of a step for the log, in addition to its metrics."""

    spike: bool = False  # the loss is far above the recent losses
    begins_epoch: bool = False
    cleared: bool = False  # the Engram tables were cleared after the step


@dataclass
class RunProgress:
    """Position and losses of a run; saved in every checkpoint."""

    step: int = 0  # optimizer steps done
    bytes_seen: int = 0  # training bytes read, including PAD
    epoch: int = 0  # epoch of the last step that was not skipped
    best_loss: float = math.inf  # lowest validation loss, nats per byte
    val_loss: float | None = None  # validation loss after the last step, if evaluated
    unimproved: int = 0  # consecutive evaluations, up to the last, that did not lower best_loss
    metrics: dict | None = None  # the last step's line of metrics.jsonl
    recent: list = field(default_factory=list)  # the last RECENT losses
    lowest_peak: float = math.inf  # the smallest max(recent) so far
    # the last EXPLODED_STEPS losses exceed EXPLODED * lowest_peak, or the last loss is above
    # ln(vocab_size) + 1
    exploded: bool = False
    skipped: int = 0  # consecutive steps, up to the last, with a non-finite loss or gradient
    wandb: dict | None = None  # name and id of the wandb run
    n_loops: int = 1  # loops in training; may exceed those that the model was built for
    origin: str | None = None  # real path of --resume, if the run started from its weights

    def record(
        self, numbers: dict, bytes_seen: int, epoch: int, cleared: bool = False
    ) -> StepEvents:
        """Record a completed step, and return its events.

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
        """Add the results of an evaluation to the metrics of the last step.

        numbers: the results, with `val_loss`. counts: --patience counts this evaluation, because it
        is a regular one."""
        self.metrics = {**(self.metrics or {}), **numbers}
        loss = numbers["val_loss"]
        self.val_loss = loss if math.isfinite(loss) else None
        if counts:
            self.unimproved = 0 if loss < self.best_loss else self.unimproved + 1
        self.best_loss = min(self.best_loss, loss)

    @property
    def is_best(self) -> bool:
        """Return whether the last step was evaluated and has the lowest loss so far."""
        return self.val_loss is not None and self.val_loss == self.best_loss

    def out_of_patience(self, patience: int) -> bool:
        """Return whether --patience ends the run."""
        return 0 < patience <= self.unimproved

    def check_divergence(self, max_skipped: int):
        """Raise Diverged after --max_skipped consecutive steps with a non-finite loss or gradient.
        At the end of a run, the limit is 1: a skipped last step did not train the weights."""
        if self.skipped >= max_skipped:
            raise Diverged(
                f"non-finite loss or gradient in the last steps ({self.skipped}), which changed no "
                f"weight: resume with a lower --lr or more --warmup_steps, and if no step is left, "
                f"with a larger --target_tokens"
            )

    def next_sequence(self, seq_len: int) -> int:
        """Return the index, from 0, of the next sequence to train on."""
        return self.bytes_seen // seq_len

    def forget_recent(self):
        """Forget recent training losses, since the next losses are not comparable with them."""
        self.recent = []
        self.lowest_peak = math.inf
        self.exploded = False

    def forget_losses(self, evaluations: bool):
        """Forget recent losses, since flags or data have changed.

        evaluations: also forget validation losses, since different bytes are evaluated."""
        self.forget_recent()
        self.skipped = 0
        self.unimproved = 0
        if evaluations:
            self.best_loss = math.inf
            self.val_loss = None

    def watch(self, loss: float) -> bool:
        """Add a finite loss to the recent losses. Return whether it is a spike.

        Compare it with the largest of the recent losses, not with their mean, since the losses of
        documents differ widely."""
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


def finite_or_none(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers with None, since JSON has no non-finite numbers."""
    return {
        name: value if value is not None and math.isfinite(value) else None
        for name, value in numbers.items()
    }


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the metrics of each step in metrics.jsonl, with None for non-finite numbers.

    Skip all other lines, such as a line that a kill cut short or that another program wrote. If
    there is no such file, yield nothing."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for line in file:
            numbers = {}
            with suppress(Exception):  # such a line may cause any error
                numbers = finite_or_none(json.loads(line))
            if numbers.get("step") is not None:
                yield numbers


class Metrics:
    """Write metrics.jsonl, one line per step. If the disk is full, log an error once, and write the
    lines later."""

    def __init__(self, path: Path, step: int):
        """Keep the lines of steps before `step`; the run writes the later lines again."""
        with files.atomic_write(path) as file:
            for numbers in read_metrics(path):
                if numbers["step"] < step:
                    file.write(json.dumps(numbers) + "\n")
        self.path = path
        self.pending = b""  # lines to write
        self.lock = threading.Lock()  # the thread that saves checkpoints calls sync
        self.file = open(path, "ab", 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, numbers: Mapping):
        """Write the line of a step; non-finite numbers become null."""
        with self.lock:
            is_retry = bool(self.pending)
            self.pending += json.dumps(finite_or_none(numbers)).encode() + b"\n"
        try:
            self._write_pending()
        except OSError as fault:
            if not is_retry:
                logger.error(f"METRICS NOT WRITTEN: {self.path}: {fault.strerror}; will retry")

    def _write_pending(self):
        with self.lock:
            while self.pending:
                written = self.file.write(self.pending)
                self.pending = self.pending[written:]

    def sync(self):
        """Sync all lines to disk, or raise OSError. A checkpoint gets its final name after this."""
        self._write_pending()
        os.fsync(self.file.fileno())


# --------------------------------------------------------------------------------------------------
# Signals

# If ranks receive different signals, the last of them in this list decides the exit status.
STOPS = signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM
COPY_SECONDS = 2.0  # torchrun passes a signal on within milliseconds

Result = TypeVar("Result")


class StopSignals:
    """Handle the signals that request a stop: SIGTERM, SIGINT (Ctrl-C), SIGHUP (a lost terminal),
    and SIGUSR1 (which Slurm users send before the time limit).

        first signal                  sets `asked`: the run stops after the step, and saves
        first, while `raises` is set  also raises Stopped: before the first step, in `may_interrupt`
        second, within COPY_SECONDS   ignored as a copy of the first
        second, later                 ends the process, or calls the caller's handler

    Copies are common: torchrun and `timeout` repeat a signal that was sent to all processes, a
    closed terminal sends SIGHUP twice, systemd and Slurm send two different signals. If SIGHUP or
    SIGUSR1 was ignored before, as under nohup, it stays ignored. Only the main thread can handle
    signals; in another thread, log that signals have no effect.

    Several ranks stop after the same step: each rank adds its vote to the step's all-reduce, and
    the sum tells all ranks the signal.

        vote = (ranks + 1) ** (index of the signal in STOPS), or 0 without a signal

    In base ranks + 1, the digits of the sum are the numbers of ranks that received each signal. The
    sum is exact in float64 for up to 9,000 ranks, in any order."""

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
                "this run is in a thread: signals, including Ctrl-C, do not make it stop and save"
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
        """Set `agreed` to the last of STOPS that any rank received. votes: the sum over ranks."""
        for index, number in enumerate(STOPS):
            if votes >= (self.ranks + 1) ** index:
                self.agreed = number

    def may_interrupt(self, work: Callable[[], Result]) -> Result | None:
        """Do some work unless a signal has arrived, and return its result. On one rank, a signal
        that arrives meanwhile interrupts the work; several ranks finish it together. Return None if
        there is no result.

        This cannot be a context manager: a signal could arrive between the body and the exit."""
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
            self.received = now  # before all else: another signal may interrupt this handler
            self.asked = signal.Signals(number)
            self.vote = float((self.ranks + 1) ** STOPS.index(self.asked))
            if self.ranks == 1:
                self.agreed = self.asked
            with suppress(OSError):  # stderr may be closed; the logger may be in use
                os.write(2, f"{self.asked.name}: stopping; repeat to quit at once\n".encode())
            if self.raises:
                raise Stopped("stopped before the first step")
        elif now > self.received + COPY_SECONDS:
            before = self.before[number]  # a notebook's handler ends the cell, not the kernel
            signal.signal(number, before if callable(before) else signal.SIG_DFL)
            os.kill(os.getpid(), number)


# --------------------------------------------------------------------------------------------------
# wandb and the profiler


@dataclass
class WandbLogger:
    """Log to the wandb run of --run. If wandb fails after its start, log that once, and continue
    without wandb."""

    wandb_run: Any  # None after a failure

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
        except Exception as fault:  # wandb's service died, the disk is full, ...
            self.wandb_run = None
            logger.error(
                f"wandb failed: {type(fault).__name__}: {fault}; this run now logs only to "
                f"metrics.jsonl"
            )


def start_wandb(
    name: str | None,
    settings: Mapping[str, object],
    progress: RunProgress,
    closing: ExitStack,
    resumes_in_place: bool,
) -> WandbLogger | None:
    """Start the wandb run of --run; without --run, return None.

    resumes_in_place: the run resumes in its own directory. Then the wandb run in its checkpoint
    resumes, too, if it has this name; otherwise, a new wandb run begins."""
    if not resumes_in_place:
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
            reinit="create_new",  # do not end a wandb run of the caller
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
    """Profile steps 3 to 5 of this process. Write trace.json for chrome://tracing or Perfetto."""
    from torch.profiler import profile, schedule

    profiler = profile(
        schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(directory / "trace.json")),
    )
    profiler.start()
    closing.callback(profiler.stop)
    return profiler
