"""Heartbeats between ranks: detect which rank was lost, or which one failed and why.

Every HEARTBEAT seconds each rank increments a counter in the rendezvous store and reads what others report. A rank that
fails writes its reason. A rank whose collective failed looks for counters that no longer grow, and names those ranks to
the others. `Heartbeat` does both; `is_lost_peer` recognizes the errors of such collectives.
"""

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress

import torch.distributed as dist

from spider.errors import LeftByPeer, WorldError

HEARTBEAT = 1.0                           # seconds between two heartbeats of a rank


class Heartbeat:
    """Send this rank's heartbeats and read those of the others. `store` is for the main thread; `own_store`, a second
    connection to it, for the heartbeat thread."""

    def __init__(self, store: dist.Store, own_store: dist.Store, rank: int, ranks: int):
        self.store, self.own_store, self.rank, self.ranks = store, own_store, rank, ranks
        self.stopped = threading.Event()
        self.warned = False                          # whether a rank failed, and reports why itself
        self.lost = ""                               # message that names the lost ranks, if another rank found them

    def start(self):
        self.store.set(f"host/{self.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self):
        beats = 0
        with suppress(RuntimeError):      # the store is gone: so is the job
            while not self.stopped.wait(HEARTBEAT):
                self.own_store.set(f"beat/{self.rank}", str(beats := beats + 1))
                if not self.warned and self.own_store.check(["fault"]):
                    self.warned = True
                    self.own_store.set(f"warned/{self.rank}", "")
                if not self.lost and self.own_store.check(["named"]):
                    self.lost = self.own_store.get("named").decode()
                    self.own_store.set(f"named/{self.rank}", "")

    def stop(self, fault: BaseException | None):
        """Stop the heartbeats and report an error of this rank to the others. If a collective lost its peers, raise the
        WorldError that names them, or LeftByPeer if one of them reports its own reason."""
        try:
            if fault is not None and is_lost_peer(fault):
                found = self._cause() or with_timeout(10 * HEARTBEAT, self._name_lost_ranks, None)
                raise self._cause() or found or lost_ranks_error(["rank 0 or its host"]) from None
            if fault is not None:
                with_timeout(5 * HEARTBEAT, lambda: self._report(fault), None)
        finally:
            if fault is not None:
                with_timeout((1 if self.rank else 10) * HEARTBEAT, self._wait_for_peers, None)
            self.stopped.set()

    def claim(self, line: str) -> bool:
        """Return True to the first rank that asks to print a line, or if the store does not answer."""
        key = f"printed/{hashlib.sha256(line.encode()).hexdigest()}"
        return with_timeout(HEARTBEAT, lambda: self.store.add(key, 1) == 1, True)

    def _cause(self) -> Exception | None:
        """Return why a collective failed, as far as the heartbeats know."""
        return LeftByPeer() if self.warned else WorldError(self.lost) if self.lost else None

    def _report(self, fault: BaseException):
        """Report an error of this rank. The others read it with their heartbeats, since all they see is a collective
        that fails when this process ends."""
        self.store.set(f"warned/{self.rank}", "")
        if not isinstance(fault, LeftByPeer):
            self.store.set(f"left/{self.rank}", str(fault))
            self.store.set("fault", "")

    def _wait_for_peers(self):
        """Let rank 0, which may host the store, wait until all others know the reason or are lost. Those that wait in a
        collective learn of it by their heartbeats."""
        self.store.set(f"leaves/{self.rank}", "")
        waits_for = () if self.rank else {*range(self.ranks)}
        while waits_for and not self.stopped.wait(0.1):
            waits_for = {rank for rank in waits_for
                         if not any(self.store.check([f"{word}/{rank}"]) for word in ("warned", "named", "leaves"))}

    def _name_lost_ranks(self) -> Exception:
        """Find the ranks without a heartbeat for four intervals, and name them to the others. Return the WorldError, or
        LeftByPeer if a rank reported its own reason."""
        others = set(range(self.ranks)) - {self.rank}

        def having(key: str) -> set[int]:
            return {rank for rank in others if self.store.check([f"{key}/{rank}"])}

        def beats() -> dict[int, bytes]:
            return {rank: self.store.get(f"beat/{rank}") for rank in having("beat")}
        self.store.set(f"lost/{self.rank}", "")
        before = beats()
        time.sleep(0 if having("left") else 4 * HEARTBEAT)
        if having("left"):
            return LeftByPeer()
        after, known = beats(), having("host")
        gone = sorted(rank for rank in others - having("lost") if after.get(rank) == before.get(rank))
        found = lost_ranks_error([f"rank {rank}" + (f" ({self.store.get(f'host/{rank}').decode()})" if rank in known
                                                    else "") for rank in gone])
        for rank in gone:
            self.store.set(f"leaves/{rank}", "")
        if gone:
            self.store.set("named", str(found))
        return found


def lost_ranks_error(names: list[str]) -> WorldError:
    return WorldError(f"lost {' and '.join(names) or 'the network to the others'}: ended, hanging or unreachable; the "
                      f"same command resumes from the newest checkpoint")


def is_lost_peer(fault: BaseException) -> bool:
    """Return whether an error comes from a collective with lost peers."""
    return isinstance(fault, dist.DistError) or isinstance(fault, RuntimeError) and bool(
        re.search(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|Broken pipe", str(fault)))


def in_background(work: Callable) -> Future:
    """Start `work` in a daemon thread."""
    done = Future()

    def run():
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)
    threading.Thread(target=run, daemon=True).start()
    return done


def with_timeout(seconds: float, work: Callable, default):
    """Return the result of `work`, or `default` if it fails or takes too long: the store may be lost with its host."""
    done = in_background(work)
    wait([done], seconds)
    return default if not done.done() or isinstance(done.exception(), RuntimeError) else done.result()
