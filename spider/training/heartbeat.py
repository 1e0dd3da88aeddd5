"""Signs of life between ranks: which rank was lost, which one left, and why.

Every rank counts up a number in the store by which the ranks met, once in HEARTBEAT seconds, and reads there what
others report. A rank that cannot continue writes its reason; one whose collective failed looks which numbers no longer
grow, and names those ranks to the others. `Heartbeat` does both; `is_lost_peer` tells the errors of such collectives.
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

HEARTBEAT = 1.0                           # seconds between two signs of life of a rank


class Heartbeat:
    """This rank's signs of life, and what it reads of the others'. `store` is for the main thread, `own_store`, another
    connection to it, for the thread that beats."""

    def __init__(self, store: dist.Store, own_store: dist.Store, rank: int, ranks: int):
        self.store, self.own_store, self.rank, self.ranks = store, own_store, rank, ranks
        self.stopped = threading.Event()
        self.warned = False                          # that a rank leaves, which prints why
        self.lost = ""                               # message of the rank that named those that were lost

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
        """Stop beating. An error of this rank alone is reported to the others. That of a collective which lost its
        peers is raised as the WorldError that names them, or as LeftByPeer where one of them prints its own reason."""
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
        """Return true to the first rank that asks to print a line, and where the store does not answer."""
        key = f"printed/{hashlib.sha256(line.encode()).hexdigest()}"
        return with_timeout(HEARTBEAT, lambda: self.store.add(key, 1) == 1, True)

    def _cause(self) -> Exception | None:
        """Return why a collective failed, as far as the beats brought it."""
        return LeftByPeer() if self.warned else WorldError(self.lost) if self.lost else None

    def _report(self, fault: BaseException):
        """Report an error of this rank. The others read it with their beats: what they see of it is a collective that
        fails when this process ends."""
        self.store.set(f"warned/{self.rank}", "")
        if not isinstance(fault, LeftByPeer):
            self.store.set(f"left/{self.rank}", str(fault))
            self.store.set("fault", "")

    def _wait_for_peers(self):
        """On rank 0, with which the store may end, wait until all others know why, or are lost. They may read of a loss
        with their beats alone, while they wait for this rank in a collective."""
        self.store.set(f"leaves/{self.rank}", "")
        waits_for = () if self.rank else {*range(self.ranks)}
        while waits_for and not self.stopped.wait(0.1):
            waits_for = {rank for rank in waits_for
                         if not any(self.store.check([f"{word}/{rank}"]) for word in ("warned", "named", "leaves"))}

    def _name_lost_ranks(self) -> Exception:
        """Name the ranks without a sign of life in four heartbeats, to the others too; LeftByPeer where one of them
        reported its own reason."""
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
    return WorldError(f"lost {' and '.join(names) or 'the network to the others'}: it ended, hangs or cannot be "
                      f"reached; saved checkpoints are kept, and the same command resumes from them")


def is_lost_peer(fault: BaseException) -> bool:
    """Tell whether an error is that of a collective whose other ranks are gone."""
    return isinstance(fault, dist.DistError) or isinstance(fault, RuntimeError) and bool(
        re.search(r"gloo|NCCL|Connection (closed|reset)|[Tt]imed out|Broken pipe", str(fault)))


def in_background(work: Callable) -> Future:
    """Start `work` in a thread that the end of the process does not wait for."""
    done = Future()

    def run():
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)
    threading.Thread(target=run, daemon=True).start()
    return done


def with_timeout(seconds: float, work: Callable, default):
    """Return what `work` returns, `default` where it fails or takes longer: a store may be gone with its host."""
    done = in_background(work)
    wait([done], seconds)
    return default if not done.done() or isinstance(done.exception(), RuntimeError) else done.result()
