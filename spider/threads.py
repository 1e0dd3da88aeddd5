"""The limits of the control groups (containers) of this process, and the threads of torch on a CPU:
how many, and how long an idle one keeps its core.

Importing the package calls `set_threads`, because OpenMP reads its variables once, when torch is
loaded. By itself torch starts a thread for each core that the process may use, or in a container
with a quota for each core of the host. Idle threads then spin for milliseconds, on cores that other
programs want (docs/results/performance.md#threads).
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

# How long a thread waits for work before it gives up its core: libgomp's in rounds of a loop,
# 300,000 without this; libomp's (macOS) in milliseconds, 200 without this.
WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def set_threads(environ: MutableMapping[str, str] = os.environ, root: Path = Path("/")):
    """Set the variables of OpenMP that the user has not set."""
    variables = {} if environ.get("OMP_WAIT_POLICY") else dict(WAITING)
    quota = cpu_quota(root)
    # Not without need, since programs that this one starts, such as torchrun, inherit it.
    if quota < math.inf and quota < len(os.sched_getaffinity(0)):
        variables["OMP_NUM_THREADS"] = str(max(1, int(quota)))
    for name, value in variables.items():
        environ[name] = environ.get(name) or value


def idle_threads_spin(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether idle threads spin, because torch was imported before this package."""
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
