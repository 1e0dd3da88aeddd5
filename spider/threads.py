"""The threads of torch on a CPU: how many, and how long an idle one keeps its core.

Importing the package calls `set_threads`, because OpenMP reads its variables once, when torch is
loaded. Without it idle threads spin for milliseconds, on cores that other programs want, and in a
container torch starts a thread for each core of the host (docs/results/performance.md has figures).
"""

import math
import os
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path

# How long a thread waits for work before it gives up its core: libgomp's in rounds of a loop,
# 300,000 without this; libomp's (macOS) in milliseconds, 200 without this.
WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def set_threads(environ: MutableMapping[str, str] = os.environ):
    """Set the variables of OpenMP that the user has not set."""
    if "OMP_WAIT_POLICY" not in environ:
        for name, value in WAITING.items():
            environ.setdefault(name, value)
    cores = usable_cores()
    if cores is not None:
        environ.setdefault("OMP_NUM_THREADS", str(cores))


def usable_cores(root: Path = Path("/")) -> int | None:
    """Return how many cores this process may use: those of its CPU affinity, or fewer if a
    container's quota is smaller. None on macOS, which has neither."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = set()  # a core may run several hardware threads, which do not help products
    for cpu in os.sched_getaffinity(0):
        siblings = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.add(read(siblings) or str(cpu))
    return max(1, int(min(len(cores), cpu_quota(root))))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the cores whose time the control groups of this process allow, of cgroup v1 and v2."""
    quota = math.inf
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)  # of v2: 0::/path
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / controllers
        group = mount / path.lstrip("/")  # in a container this may be a path of the host
        for directory in (group, *group.parents):
            if directory.is_relative_to(mount):
                quota = min(quota, quota_of(directory))
    return quota


def quota_of(directory: Path) -> float:
    """Return the quota of a control group, in cores; infinity if it has none."""
    of_v2 = read(directory / "cpu.max")
    of_v1 = read(directory / "cpu.cfs_quota_us") + " " + read(directory / "cpu.cfs_period_us")
    for text in (of_v2, of_v1):
        with suppress(ValueError):  # "max", or no such file
            time, period = map(int, text.split())
            if time > 0:  # v1 says -1 for none
                return time / period
    return math.inf


def read(path: Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
