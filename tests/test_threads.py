"""spider/threads.py: how many threads, and how they wait."""

import math
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from spider.threads import cpu_quota, set_threads, usable_cores

V1 = "4:memory:/job\n3:cpu,cpuacct:/job\n"


def make_groups(root, groups: str, files: dict[str, str]):
    """Make the files of control groups below `root`, of a process in `groups`."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    "groups, files, quota",
    (
        ("", {}, math.inf),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        # the smallest of the groups that hold this one counts
        ("0::/pod/job\n", {"pod/cpu.max": "50000 100000", "pod/job/cpu.max": "400000 100000"}, 0.5),
        (V1, {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000"}, math.inf),  # without a period
        # in a container the path is the host's, and its own group is the root
        ("0::/docker/1f\n", {"cpu.max": "150000 50000"}, 3.0),
    ),
)
def test_quota_is_that_of_the_control_groups(tmp_path, groups, files, quota):
    make_groups(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize("time, quota", (("300000", 3.0), ("-1", math.inf)))
def test_quota_of_version_1_has_its_time_and_period_in_two_files(tmp_path, time, quota):
    group = "sys/fs/cgroup/cpu,cpuacct/job"
    files = {f"{group}/cpu.cfs_quota_us": time, f"{group}/cpu.cfs_period_us": "100000"}
    make_groups(tmp_path, V1, files)
    assert cpu_quota(tmp_path) == quota


def test_cores_are_those_of_the_affinity_that_differ_and_of_a_quota_at_least_one(tmp_path):
    cpus = os.sched_getaffinity(0)
    assert usable_cores(tmp_path) == len(cpus)
    siblings = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    files = {siblings.format(cpu): "0-99\n" for cpu in cpus}  # all threads of one core
    make_groups(tmp_path, "0::/\n", files)
    assert usable_cores(tmp_path) == 1

    other = tmp_path / "other"
    make_groups(other, "0::/\n", {"sys/fs/cgroup/cpu.max": "50000 100000"})
    assert usable_cores(other) == 1
    try:
        os.sched_setaffinity(0, {min(cpus)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, cpus)


def test_variables_of_the_user_stay():
    environ = {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "7"}
    set_threads(environ)
    assert environ == {"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "7"}
    environ = {"GOMP_SPINCOUNT": "5"}
    set_threads(environ)
    assert environ["GOMP_SPINCOUNT"] == "5"
    assert environ["KMP_BLOCKTIME"] == "1"


PRINT = "import os, torch; print(os.environ.get('GOMP_SPINCOUNT'), torch.get_num_threads())"


@pytest.mark.slow
@pytest.mark.parametrize("module", ("spider_model", "tile_moe", "train", "sample", "data", "bench"))
def test_every_module_sets_threads_before_it_imports_torch(module, tmp_path):
    ours = ("OMP_NUM_THREADS", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    command = [sys.executable, "-c", f"import {module}; {PRINT}"]
    environ["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == ["1000", str(usable_cores())], done.stderr
