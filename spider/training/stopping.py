"""Shutdown: signals, and all conditions that end the training loop."""

import json
import os
import shlex
import signal
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from loguru import logger

from spider import errors
from spider.errors import CheckpointError, Diverged, LeftByPeer, Stopped
from spider.training.checkpoint_writer import CheckpointWriter
from spider.training.heartbeat import is_lost_peer
from spider.training.machine import is_out_of_memory
from spider.training.progress import RunProgress
from spider.training.ranks import World

STOPS = signal.SIGTERM, signal.SIGINT
REPEATED = 5.0                            # seconds within which signals to a rank count as one


class StopSignals:
    """Handle SIGTERM and SIGINT: the first one stops the run gracefully, a second one ends the process at once.

    A signal sets `asked`. If `seconds` is a number, it also raises Stopped after that time. torchrun may repeat a
    signal that a terminal or Slurm sent to all ranks, so within REPEATED seconds signals to a rank count as one.
    """

    def __init__(self, world: World | None = None):
        self.world = World() if world is None else world
        self.asked: signal.Signals | None = None
        self.asked_at, self.seconds = 0.0, 0.0

    def __enter__(self):
        handlers = {signal.SIGTERM: self._ask, signal.SIGINT: self._ask, signal.SIGALRM: self._time_is_up}
        on_main_thread = threading.current_thread() is threading.main_thread()  # others cannot set handlers
        self.before = {number: signal.signal(number, handlers[number]) for number in handlers if on_main_thread}
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @contextmanager
    def patience(self, seconds: float):
        """Raise Stopped inside, `seconds` after a signal; after an earlier signal, once the body has begun."""
        self.seconds = seconds
        try:
            if self.asked:                # a context manager cannot raise before its body
                signal.setitimer(signal.ITIMER_REAL, 0.2, 1.0)
            yield
        finally:
            self.seconds = None
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _ask(self, number: int, _):
        if self.asked and self.world.ranks > 1 and time.monotonic() < self.asked_at + REPEATED:
            return
        if self.asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.asked, self.asked_at = signal.Signals(number), time.monotonic()
        with suppress(OSError):           # stderr may be gone; the logger may be busy
            os.write(2, f"{self.asked.name}: stopping; repeat to quit at once\n".encode() * self.world.is_rank0)
        if self.seconds is not None:
            signal.setitimer(signal.ITIMER_REAL, self.seconds or 1.0, 1.0)  # repeats, in case a library swallows it
        if self.seconds == 0:
            self._time_is_up()

    def _time_is_up(self, *_):
        if self.seconds is not None:
            raise Stopped("stopped before the first step; the same command resumes")


class Stopping:
    """Decide when the training loop ends: signal, bad data, out of memory, divergence, patience, the last step.

    An interruption is recorded where it happens; `agreed` decides what follows. Several ranks learn of each other's
    signals by the all-reduce of each step and of each round of an evaluation. A rank that cannot begin a step stops all
    others, which would hang without it. Work with collectives is not interrupted by signals. If out of memory or a lost
    rank ends it, the ranks cannot agree any more, but no weight has changed since the last step: rank 0 saves that
    state alone, unless weights are sharded.
    """

    def __init__(self, stop: StopSignals, writer: CheckpointWriter, start: int, last_step: int, max_skipped: int,
                 patience: int = 0):
        self.stop, self.writer, self.max_skipped, self.patience = stop, writer, max_skipped, patience
        self.world = stop.world
        self.world.own_votes |= {number.name: lambda number=number: stop.asked == number for number in STOPS}
        self.world.own_votes["retry"] = lambda: writer.retry_is_due()
        self.world.check_signals = self._check_signals
        self.start, self.last_step = start, last_step
        self.cut_short, self.fault, self.began = False, None, time.perf_counter()
        self.pauses, self.paused = 0, 0.0  # evaluations and samples so far, seconds of them
        stop.seconds = None               # from here on signals only set `asked`

    @contextmanager
    def droppable(self, seconds: float):
        """Run work that can be dropped: it ends `seconds` after a signal, or at once by bad data or out of memory."""
        try:
            with self.stop.patience(seconds) if self.world.ranks == 1 else nullcontext():
                yield
        except Stopped:
            self.cut_short = True
        except (errors.DataError, LeftByPeer, MemoryError, RuntimeError) as fault:
            ends_work = not isinstance(fault, (errors.DataError, LeftByPeer))
            saves = self.world.ranks == 1 or not self.writer.sharded  # sharded checkpoints need all ranks
            ends_run = is_out_of_memory(fault) or is_lost_peer(fault)
            if ends_work and not (ends_run and saves and self.world.continue_alone()):
                raise
            self.cut_short, self.fault = True, fault

    @contextmanager
    def pause(self, works: int):
        """Run evaluations or samples, `works` of them, which a signal ends at once; `seconds_left` uses their time."""
        began = time.perf_counter()
        with self.droppable(0):
            yield
        self.pauses, self.paused = self.pauses + works, self.paused + time.perf_counter() - began

    def agreed(self) -> int:
        """Return 0 to continue, 1 to stop after this step, 2 to stop now because work was interrupted; the same on all
        ranks."""
        return 2 if self.cut_short else 1 if self.asked else 0

    @property
    def asked(self) -> signal.Signals | None:
        """Return the signal that any rank received, once all ranks know of it."""
        return next((number for number in STOPS if self.world.any_voted(number.name)), None)

    def _check_signals(self):
        if self.asked:
            raise Stopped

    def retry_is_due(self) -> bool:
        """Return whether to retry a failed checkpoint now."""
        return self.world.any_voted("retry")

    def drops(self) -> bool:
        """Return whether work was interrupted, so that its results are dropped."""
        return self.agreed() == 2

    def continues(self, progress: RunProgress) -> bool:
        """Return whether to run another step, or to finish a pending one. Raise Diverged after `max_skipped` skipped
        steps."""
        if progress.skipped >= self.max_skipped and progress.step > self.start:
            raise Diverged(f"{progress.skipped} steps in a row had a non-finite loss or gradient and were not saved: "
                           f"resume with a lower --lr or more --warmup_steps from the newest checkpoint or, if that "
                           f"has diverged already, by --resume from an earlier one"
                           + "".join(f", {one.path}" for one in self.writer.saved[-2:-1]))
        return not (self.agreed() or progress.is_out_of_patience(self.patience)) and progress.written < self.last_step

    def seconds_left(self, step: int, pauses: int) -> float:
        """Estimate the seconds until the end: the remaining steps, and `pauses` evaluations and samples."""
        pace = (time.perf_counter() - self.began - self.paused) / (step - self.start)
        return min((self.last_step - step) * pace + pauses * self.paused / max(1, self.pauses), 1e9)

    def report(self, progress: RunProgress, resume_hint: str):
        """Raise the error or signal that stopped the run, after its last save; log the end of a completed run."""
        if self.fault:
            raise self.fault
        if not self.writer.holds(progress.step):
            raise CheckpointError(f"--ckpt_dir: step {progress.step} could not be saved in {self.writer.directory}; "
                                  f"older checkpoints are intact: make room, and {resume_hint}")
        if self.asked:
            self.stop.asked = self.asked  # of another rank
            raise Stopped(f"stopped after step {progress.step}, which is saved in {self.writer.directory}; "
                          f"{resume_hint}")
        if progress.is_out_of_patience(self.patience):
            logger.info(f"ended by --patience {self.patience}: the last {progress.unimproved} evaluations did not "
                        f"lower the validation loss; raise it, or set it to 0, to continue")
        logger.info(f"done: step {progress.step}, {progress.bytes_seen:,} bytes, best validation loss "
                    f"{progress.best_loss:.4f}, {time.perf_counter() - self.began:.0f} s")
        logger.info(f"next: python sample.py {shlex.quote(str(self.writer.directory))}")


def tell_torchrun(line: str):
    """Write the error file that torchrun reports, so that it shows this line instead of a traceback."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        report = dict(message=dict(message=line, extraInfo=dict(timestamp=int(time.time()))))
        with suppress(OSError):
            Path(path).write_text(json.dumps(report))
