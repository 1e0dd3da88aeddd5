"""Prepare a process before it imports torch: its threads, its CUDA allocator; the limits of its
control groups (containers).

A script calls `start_script` in its first line; another program calls `set_threads`. OpenMP reads
its variables once, when torch is loaded. Without them torch starts a thread for each core that the
process may use, or in a container with a quota for each core of the host. Idle threads then spin
for milliseconds, on cores that other programs want (docs/results/performance.md#threads).
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

PARENT_PID = (
    os.getppid()
)  # the process that started this one, noted before the slow import of torch

# How long a thread waits for work before it gives up its core: libgomp's in rounds of a loop,
# 300,000 without this; libomp's (macOS) in milliseconds, 200 without this.
SPIN_LIMITS = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def start_script(prog: str):
    """Prepare the process of a script, before it imports torch, which takes seconds.

    Until the imports are done, Ctrl-C ends the process without a traceback. If packages are
    missing, print a line and exit. Then set threads and allocator."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = run_command(check_installed, prog)
    if status:
        sys.exit(status)
    set_threads()
    set_allocator()


def check_installed():
    """Raise UsageError if packages are missing that every script imports."""
    needed = ("numpy", "torch", "loguru", "filelock")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{sys.executable} has no {', '.join(missing)}: activate the environment that has "
            f"Spider, or install it by pip install -e ."
        )


def set_allocator():
    """Let torch's CUDA allocator extend its segments, because the number of rows varies by step.

    Call it before torch is imported. Settings of the user stay.

    Not on WSL2: drivers before R615 refuse to map such segments ("CUDA driver error: unknown
    error"), or report a lack of memory as "device not ready" (pytorch/pytorch#192330)."""
    if "PYTORCH_CUDA_ALLOC_CONF" in os.environ or "microsoft" in platform.release().lower():
        return
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def set_threads(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")):
    """Set the variables of OpenMP that the user has not set. Call this before torch is imported,
    which reads them; after that it warns, and only processes started from here are
    affected."""
    is_late = "torch" in sys.modules and sys.modules["torch"].get_num_threads() > 1
    if is_late and idle_threads_spin(environ):
        warnings.warn(
            "torch is already imported: its idle threads spin, so that next to other programs a "
            "step may take many times as long. Call set_threads() before torch is imported; in a "
            "notebook restart the kernel",
            stacklevel=2,
        )
    variables = {} if environ.get("OMP_WAIT_POLICY") else dict(SPIN_LIMITS)
    quota = cpu_quota(root)
    # Not without need, since programs that this one starts, such as torchrun, inherit it.
    if quota < math.inf and quota < len(os.sched_getaffinity(0)):
        variables["OMP_NUM_THREADS"] = str(max(1, int(quota)))
    for name, value in variables.items():
        environ[name] = environ.get(name) or value


def idle_threads_spin(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether torch's idle threads spin, because nothing told them to wait."""
    return not (environ.get("GOMP_SPINCOUNT") or environ.get("OMP_WAIT_POLICY"))


def cpu_quota(root: Path) -> float:
    """Return the cores whose time the control groups of this process allow; infinity without a
    limit, and on other systems than Linux."""
    return min(map(quota_of, control_groups(root, "cpu")), default=math.inf)


def memory_limit(root: Path = Path("/")) -> float:
    """Return the bytes that the control groups of this process allow, infinity without a limit."""
    limit = math.inf
    for directory in control_groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # of version 2 and 1
            text = read(directory / name)
            if text.isdigit():  # not "max"
                limit = min(limit, int(text))
    return limit


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of the control groups that hold this process, from the innermost one to
    the root. controller: what the groups limit, which matters in cgroup v1."""
    groups = re.findall("^[0-9]+:(.*?):/(.*)$", read(root / "proc/self/cgroup"), re.MULTILINE)
    for controllers, path in groups:
        mount = root / "sys/fs/cgroup"
        if controllers:  # only version 1 names some
            if controller not in controllers.split(","):
                continue
            mount /= controller
        group = mount / path  # in a container this may be a path of the host
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                yield directory


def quota_of(directory: Path) -> float:
    """Return the quota of a control group, in cores; infinity if it has none."""
    of_v2 = read(directory / "cpu.max")
    of_v1 = read(directory / "cpu.cfs_quota_us") + " " + read(directory / "cpu.cfs_period_us")
    for text in (of_v2, of_v1):
        numbers = re.fullmatch(r"(\d+) ([1-9]\d*)", text)  # not "max 100000", nor -1 of version 1
        if numbers:
            return int(numbers[1]) / int(numbers[2])
    return math.inf


def read(path: Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
