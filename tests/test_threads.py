"""spider/threads.py: threads, the allocator, the limits of containers."""

import math
import os
import subprocess
import sys

import pytest

from conftest import ROOT
from spider import threads
from spider.threads import SPIN_LIMITS, cpu_quota, idle_threads_spin, memory_limit, set_threads

V1 = "4:memory:/job\n3:cpuacct,cpu:/job\n"
CPU = "cpu/job/cpu.cfs_"


def make_groups(root, groups: str, files: dict[str, str]):
    """Write files of control groups below `root` for a process in `groups`."""
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


HALF = "50000 100000"


@pytest.mark.parametrize(
    "groups, files, quota, memory",
    (
        ("0::/\n", {}, math.inf, math.inf),
        ("0::/\n", {"cpu.max": "250000 100000\n", "memory.max": "5000\n"}, 2.5, 5000),
        ("no group\n", {"cpu.max": HALF, "memory.max": "5000"}, math.inf, math.inf),
        # the smallest limit of this group and the groups above it counts
        ("0::/pod/job\n", {"pod/cpu.max": HALF, "pod/job/memory.max": "6000"}, 0.5, 6000),
        ("0::/pod/job\n", {"pod/memory.max": "4", "pod/job/memory.max": "6"}, math.inf, 4),
        # in a container the path is the host's, but the container's own group is the root
        ("0::/docker/1f\n", {"cpu.max": "150000 50000", "memory.max": "max"}, 3.0, math.inf),
        (V1, {f"{CPU}quota_us": "300000", f"{CPU}period_us": "200000"}, 1.5, math.inf),
        (V1, {f"{CPU}quota_us": "-1", f"{CPU}period_us": "100000"}, math.inf, math.inf),
        (V1, {"memory/job/memory.limit_in_bytes": "3"}, math.inf, 3),
    ),
)
def test_cpu_quota_and_memory_limit_come_from_cgroups(tmp_path, groups, files, quota, memory):
    make_groups(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert (cpu_quota(tmp_path), memory_limit(tmp_path)) == (quota, memory)


@pytest.mark.parametrize(
    "quota, before, after",
    (
        ("max", {}, {**SPIN_LIMITS}),
        ("50000", {}, {**SPIN_LIMITS, "OMP_NUM_THREADS": "1"}),
        ("800000", {}, {**SPIN_LIMITS}),  # more CPUs than the process may use
        ("100000", {"OMP_NUM_THREADS": "7"}, {**SPIN_LIMITS, "OMP_NUM_THREADS": "7"}),
        (
            "max",
            {"GOMP_SPINCOUNT": "5", "KMP_BLOCKTIME": ""},
            {**SPIN_LIMITS, "GOMP_SPINCOUNT": "5"},
        ),
        ("max", {"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ),
)
def test_quota_limits_threads_and_user_variables_are_kept(
    tmp_path, monkeypatch, quota, before, after
):
    """The machine has 64 cores; the process may use two."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    make_groups(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": f"{quota} 100000"})
    (tmp_path / "proc/loadavg").write_text("0.50 0.10 0.10 1/96 3140")
    environ = dict(before)
    assert idle_threads_spin(environ) == (not before or "OMP_NUM_THREADS" in before)
    set_threads(environ, tmp_path)
    assert environ == after and not idle_threads_spin(environ)


def test_threads_spin_longer_on_an_idle_machine_unless_the_user_chose(tmp_path):
    make_groups(tmp_path, "0::/\n", {"proc/loadavg": "0.49 3.10 3.10 1/96 3140\n"})
    for before, rounds in (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")):
        environ = dict(before)
        set_threads(environ, tmp_path)
        assert environ == {**SPIN_LIMITS, "GOMP_SPINCOUNT": rounds}


@pytest.mark.parametrize("first", ("", "import torch;"))
def test_set_threads_warns_if_torch_is_already_imported(first):
    environ = {name: value for name, value in os.environ.items() if name not in SPIN_LIMITS}
    environ |= dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="2")
    program = f"import os; {first} from spider.threads import set_threads; set_threads(); "
    program += "print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() in ("1000", "10000"), done.stderr
    assert ("torch is already imported" in done.stderr) == bool(first)


NEW = "PYTORCH_ALLOC_CONF"
OLD = "PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    "kernel, before, after",
    (
        ("6.8.0-45-generic", {}, {NEW: "expandable_segments:True"}),
        ("6.8.0-45-generic", {OLD: "x"}, {OLD: "x"}),
        ("6.18.33.2-microsoft-standard-WSL2", {}, {}),
    ),
)
def test_allocator_extends_segments_unless_the_user_chose_or_wsls_drivers_refuse(
    monkeypatch, kernel, before, after
):
    environ = dict(before)
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr("platform.release", lambda: kernel)
    threads.set_allocator()
    assert environ == after


IMPORTS = """
import os, signal, sys, warnings
warnings.simplefilter("error")
before = dict(os.environ), signal.getsignal(signal.SIGINT)
import spider, spider_model, tile_moe, data, tokenizer, sample, bench, train
assert before == (dict(os.environ), signal.getsignal(signal.SIGINT))
"""


@pytest.mark.slow
def test_imports_change_no_environment_or_signal_handler():
    environ = {name: value for name, value in os.environ.items() if name not in SPIN_LIMITS}
    subprocess.run([sys.executable, "-c", IMPORTS], env=environ, cwd=ROOT, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("script", ("train.py", "sample.py", "bench.py"))
def test_scripts_set_threads_before_importing_torch(script, tmp_path):
    """A stand-in module called torch prints the variable when it is imported."""
    (tmp_path / "torch.py").write_text("import os; print(os.environ['GOMP_SPINCOUNT']); 1 / 0")
    (tmp_path / "probe.py").write_text(
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; import runpy; "
        f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    )
    environ = {name: value for name, value in os.environ.items() if name not in SPIN_LIMITS}
    command = [sys.executable, tmp_path / "probe.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.stdout.strip() in ("1000", "10000"), done.stderr
