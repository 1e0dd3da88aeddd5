"""Prepare a process before it imports torch: threads, CUDA allocator, limits of its container.

A script calls `start_script` in its first line; a program of your own calls `set_threads` before it
imports torch. Importing this module changes nothing.
"""

import importlib.util
import math
import os
import platform
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

from spider.errors import UsageError, run_command

PARENT_PID = os.getppid()  # read now: the parent may die while torch is being imported

# How long an idle thread spins before it gives up its core: for libgomp in rounds of a loop, by
# default 300,000; for libomp (macOS) in milliseconds, by default 200
SPIN_LIMITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
ON_IDLE_MACHINE = {"GOMP_SPINCOUNT": "10000"}  # instead, if fewer than IDLE_LOAD cores are busy
IDLE_LOAD = 0.5


def start_script(prog: str):
    """Prepare the process of a script: check its packages (or print a line and exit), set threads
    and allocator. While the script imports torch, Ctrl-C ends it without a traceback."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = run_command(check_installed, prog)
    if status:
        sys.exit(status)
    set_threads()
    set_allocator()


def check_installed():
    """Raise UsageError if a package that every script imports is missing."""
    needed = ("numpy", "torch", "loguru", "filelock")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{sys.executable} has no {', '.join(missing)}: activate the environment that has "
            f"Spider, or install it with pip install -e ."
        )


def set_allocator():
    """Let torch's CUDA allocator extend its segments, since the number of tokens varies by step.

    Call it before torch is imported. It keeps the user's settings, and skips WSL2: drivers before
    R615 refuse to map such segments ("CUDA driver error: unknown error"), or report a lack of
    memory as "device not ready" (pytorch/pytorch#192330)."""
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "microsoft" in platform.release().lower():
        return
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def set_threads(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")):
    """Set OpenMP's environment variables, except those that the user has set.

    Call it before torch is imported: OpenMP reads them once, when torch is loaded. A later call
    warns, and affects only processes started from this one. Two things change:

    - Idle threads soon give up their cores, a little later on an idle machine. By default they
      spin for milliseconds, so that next to other programs a step may take many times as long
      (docs/results/performance.md#threads).
    - In a container with a CPU quota, torch starts as many threads as the quota has cores. By
      default it starts one for each core of the host."""
    is_late = "torch" in sys.modules and sys.modules["torch"].get_num_threads() > 1
    if is_late and idle_threads_spin(environ):
        warnings.warn(
            "torch is already imported: its idle threads spin, so that next to other programs a "
            "step may take many times as long. Call set_threads() before importing torch; in a "
            "notebook, restart the kernel",
            stacklevel=2,
        )
    variables: dict[str, str] = {}
    if not environ.get("OMP_WAIT_POLICY"):
        variables |= SPIN_LIMITS
        if load_average(root) < IDLE_LOAD:
            variables |= ON_IDLE_MACHINE
    quota = cpu_quota(root)
    # Only if needed, since child processes, such as torchrun, inherit it
    if quota < math.inf and quota < len(os.sched_getaffinity(0)):
        variables["OMP_NUM_THREADS"] = str(max(1, int(quota)))
    for name, value in variables.items():
        environ[name] = environ.get(name) or value


def idle_threads_spin(environ: Mapping[str, str]) -> bool:
    """Return whether torch's idle threads spin, because no variable limits it."""
    return not (environ.get("GOMP_SPINCOUNT") or environ.get("OMP_WAIT_POLICY"))


def load_average(root: Path) -> float:
    """Return how many cores were busy in the last minute; infinity outside Linux."""
    return float(read_file(root / "proc/loadavg").partition(" ")[0] or math.inf)


# --------------------------------------------------------------------------------------------------
# Limits of control groups (containers)


def cpu_quota(root: Path) -> float:
    """Return how many cores' time the control groups of this process allow; infinity without a
    limit or outside Linux."""
    return min(map(quota_of, control_groups(root, "cpu")), default=math.inf)


def memory_limit(root: Path = Path("/")) -> float:
    """Return the bytes that the control groups of this process allow, infinity without a limit."""
    limit = math.inf
    for directory in control_groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2, v1
            text = read_file(directory / name)
            if text.isdigit():  # not "max"
                limit = min(limit, int(text))
    return limit


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the control groups that contain this process, from the innermost to
    the root. controller: what the groups limit; only cgroup v1 separates them."""
    groups = re.findall("^[0-9]+:(.*?):/(.*)$", read_file(root / "proc/self/cgroup"), re.MULTILINE)
    for controllers, path in groups:
        mount = root / "sys/fs/cgroup"
        if controllers:  # only v1 names them
            if controller not in controllers.split(","):
                continue
            mount /= controller
        group = mount / path  # in a container this may be the host's path
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                yield directory


def quota_of(group: Path) -> float:
    """Return the quota of a control group, in cores; infinity if it has none."""
    v2 = read_file(group / "cpu.max")
    v1 = read_file(group / "cpu.cfs_quota_us") + " " + read_file(group / "cpu.cfs_period_us")
    for text in (v2, v1):
        numbers = re.fullmatch(r"(\d+) ([1-9]\d*)", text)  # no limit: "max 100000", in v1 -1
        if numbers:
            return int(numbers[1]) / int(numbers[2])
    return math.inf


def read_file(path: Path) -> str:
    """Return the text of a file, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
