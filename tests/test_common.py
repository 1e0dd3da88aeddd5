"""What all scripts share: errors of one line, flags, files that are complete or absent, locks."""

import ast
import errno
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import bench
import data
import sample
import train
from conftest import ROOT, contents
from jobs import until
from spider import files, threads
from spider.errors import Diverged, UsageError, one_line, printable, run_command
from spider.files import atomic_write, locked
from spider.flags import OTHER_NAMES
from test_docs import flags_of


def raises(fault: BaseException):
    """Return a function that raises an exception, whatever its arguments."""

    def fail(*_):
        raise fault

    return fail


# --------------------------------------------------------------------------------------------------
# Errors and the terminal


@pytest.mark.parametrize(
    "fault, status, line",
    (
        (UsageError("no\nsuch"), 2, "error: no\\nsuch"),
        (Diverged("lower --lr"), 1, "error: lower --lr"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: x: No such file"),
        (KeyboardInterrupt(), 130, "stopped"),
        (FloatingPointError("inf"), 2, "error: inf"),
        # however long what it quotes is; the remedy stands at the end
        (
            UsageError(2000 * "x" + ": use --set"),
            2,
            f"error: {493 * 'x'} ... {489 * 'x'}: use --set",
        ),
    ),
)
def test_expected_error_is_one_line_and_a_status(capsys, fault, status, line):
    assert run_command(raises(fault), "x.py", interrupted="stopped") == status
    assert capsys.readouterr() == ("", f"x.py: {line}\n")


def test_torchruns_report_ends_with_the_line_of_the_error(tmp_path, monkeypatch):
    file = tmp_path / "error.json"  # torchrun gives each rank one
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    run_command(raises(UsageError("give --target_tokens")), "x.py")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    *_, last, _ = str(ChildFailedError("x.py", {0: failure})).splitlines()
    assert last == "  traceback : error: give --target_tokens"


def test_defect_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="a defect"):
        run_command(raises(RuntimeError("a defect")), "x.py")


@pytest.mark.parametrize(
    "closed, out, err",
    (
        (">&-", "", "err\nsignal"),
        ("2>&-", "out\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ),
)
def test_no_file_takes_the_place_of_a_stream_that_the_caller_closed(tmp_path, closed, out, err):
    """Else what a program prints would be written into one of its own files."""
    program = f"""
import os, sys
from spider.errors import print_status, run_command, print_line
def work():
    with open({str(tmp_path / "a")!r}, "w", buffering=1) as file:
        file.write("own")
        print_line("out")
        print_status("err")
        os.write(2, b"signal")
sys.exit(run_command(work, "x.py"))"""
    command = f"{sys.executable} -c {shlex.quote(program)} {closed}"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert (tmp_path / "a").read_text() == "own"
    assert (done.stdout, done.stderr) == (out, err)


def test_names_and_data_cannot_control_the_terminal():
    assert one_line("a\x1b[2J\r\n\u202e\udcff\u6f22") == "a\\x1b[2J\\r\\n\\u202e\\udcff\u6f22"
    ids = [257, *"a\\\n\u6f22".encode(), 0xE6, 256, 271]
    assert printable(ids) == "\\<BOS>a\\\\\\n\u6f22\\xe6\\<PAD>\\<271>"
    assert printable([194, 160]) != printable([160])  # U+00A0, and a byte that is no UTF-8


# --------------------------------------------------------------------------------------------------
# Flags

PARSERS = {
    "train.py": train.parse_args,
    "sample.py": sample.parse_args,
    "data.py": data.parse_args,
    "bench.py": bench.measure,
}


@pytest.mark.parametrize(
    "command, remedy",
    (
        ("train.py --seq-len 64", "unknown flag --seq-len: use --seq_len"),
        ("train.py --learnin_rate 1", "the nearest is --lr"),
        ("train.py --training.steps 9", "unknown flag --training.steps: use --target_tokens"),
        ("train.py --zzz 1 --depth=4", "unknown flag --zzz; unknown flag --depth: use --model"),
        ("train.py config/train_shakespeare_char.py --device=cpu", "by --config"),
        ("train.py --no_keep_best", "use --keep_best=False"),
        (
            "train.py input.txt",
            "word input.txt: give a text by --text, shards by --data_dir",
        ),
        ("bench.py --model huge", "see python bench.py --help"),
        ("train.py --target_tokens 1M", "'1M' is not a whole number that is at least 1 (give 1e6"),
        ("train.py --target_flops 1.5k", "give 1e6 for 1M"),
        ("train.py --lr nan", "at most 1,000; see"),
        ("train.py --keep_best=1", "--keep_best: '1' is neither True nor False"),
        ("train.py --lr=--", "--lr: -- is not a value"),
        ("train.py --sample_prompt -x", "(one that begins with - as --NAME=VALUE)"),
        ("data.py prepare a --output b", "use --out; see python data.py prepare --help"),
        ("bench.py --onlly=machine", "the nearest is --only"),
    ),
)
def test_a_bad_command_line_names_what_to_give(command, remedy):
    script, *words = command.split()
    with pytest.raises(UsageError) as raised:
        PARSERS[script](words)
    assert remedy in str(raised.value)


def test_names_of_other_projects_mean_flags_that_exist():
    others = tomllib.loads(OTHER_NAMES.read_text())
    flags = {script: flags_of(script.removesuffix(".py")) for script in PARSERS}
    flags["data.py"] = flags_of("data", "prepare")
    for script, table in others.items():
        for remedy, names in table.items():
            meant = next((other for other in PARSERS if other in remedy), script)
            assert set(re.findall(r"--\w+", remedy)) <= flags[meant]
            assert not flags[script] & {f"--{name}" for name in names.split()}


def test_flags_in_a_list_may_be_numbers():
    assert sample.parse_args(["--seed", 3]).seed == 3


@pytest.mark.parametrize("script", PARSERS)
def test_missing_packages_are_one_line_and_status_2(script):
    """-S hides all that was installed."""
    argv = [sys.executable, "-S", script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env={})
    (found,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "has no numpy, torch, loguru, filelock: activate the environment" in found


@pytest.mark.parametrize("script", PARSERS)
def test_old_python_is_refused_by_the_first_import(script):
    old = "import runpy, sys; sys.version_info = (3, 10); runpy.run_path(sys.argv[1])"
    argv = [sys.executable, "-c", old, script]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, env={})
    assert "ImportError: Spider needs Python 3.11 or newer" in done.stderr.splitlines()[-1]
    for path in (script, "spider/__init__.py"):  # what runs before it, in the old syntax
        ast.parse((ROOT / path).read_text(), feature_version=(3, 10))


# --------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("where", ("writing", "replace"))
def test_durable_file_that_fails_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch, where):
    fail = raises(OSError(28, "No space left on device"))
    (tmp_path / "a").write_text("old")
    if where == "replace":
        monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="No space left"), atomic_write(tmp_path / "a") as file:
        file.write("new")
        if where == "writing":
            fail()
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("name", ("folder", "pipe", "link", "/dev/stdout"))
def test_durable_file_replaces_no_directory_pipe_or_device(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(OSError, match="not a regular file") as fault,
        atomic_write(Path(name)) as file,
    ):
        file.write("new")
    assert fault.value.filename == name
    assert sorted(os.listdir(tmp_path)) == ["folder", "link", "pipe"]


def test_durable_file_writes_through_no_link(tmp_path):
    """No name of a temporary file is used again."""
    path = tmp_path / "a"
    victim = tmp_path / "victim"
    victim.write_text("old")
    for content in "ab":
        with atomic_write(path) as file:
            file.write(content)
        Path(file.name).symlink_to(victim)
    assert path.stat().st_mode == victim.stat().st_mode  # as of any new file
    assert path.read_text() == "b" and not path.is_symlink()
    assert victim.read_text() == "old"


def test_a_second_writer_of_a_file_does_not_disturb_the_first(tmp_path, monkeypatch):
    """It takes the first one's temporary file, which is not yet held, for that of a killed process,
    holds it and deletes it."""
    hold = files.hold
    deletions = []

    def hold_second(descriptor, **options):
        monkeypatch.undo()
        (unfinished,) = tmp_path.iterdir()
        file = unfinished.open("rb")
        hold(file.fileno())

        def delete():
            unfinished.unlink()
            file.close()

        deletions.append(threading.Timer(0.1, delete))
        deletions[0].start()
        hold(descriptor, **options)

    monkeypatch.setattr(files, "hold", hold_second)
    with atomic_write(tmp_path / "a") as file:
        deletions[0].join()
        file.write("new")
    assert contents(tmp_path) == {"a": b"new"}


@pytest.mark.parametrize(
    "number, nohup",
    ((signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGHUP, []), (signal.SIGHUP, ["nohup"])),
)
def test_a_script_that_a_signal_ends_leaves_nothing_in_its_output(tmp_path, number, nohup):
    """It waits for text on stdin. Under nohup it outlives its terminal."""
    out = tmp_path / "out"
    command = [*nohup, sys.executable, "data.py", "prepare", "-", "--out", out]
    job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: out.exists() and len(os.listdir(out)) == 2)  # the lock, and a folder for shards
    job.send_signal(number)
    _, error = job.communicate(b"a text")
    assert job.returncode == (0 if nohup else 128 + number) and b"Traceback" not in error
    assert (os.listdir(out) == []) == (not nohup)


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


# --------------------------------------------------------------------------------------------------
# Locks


def test_lock_excludes_others_until_its_file_is_deleted(tmp_path, monkeypatch):
    refused = pytest.raises(UsageError, match=f"^{tmp_path}: another command is using it")

    def unlink(path, unlink=Path.unlink):
        with refused, locked(tmp_path):
            pass
        unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    for _ in range(2):
        with locked(tmp_path):
            assert all(name.startswith(".") for name in os.listdir(tmp_path))
            with locked(tmp_path, tmp_path / ".another"):
                pass
        assert os.listdir(tmp_path) == []


def test_file_system_without_locks_is_noted_and_nothing_stays_that_could_block_the_next_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(fcntl, "flock", raises(OSError(errno.ENOSYS, "Function not implemented")))
    with locked(tmp_path):
        assert "cannot be locked" in capsys.readouterr().err
        (tmp_path / ".lock").write_bytes(b"")  # as that of a killed process
    with locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []
