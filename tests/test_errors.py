"""spider/errors.py: errors of one line, the terminal, how a script ends."""

import os
import shlex
import signal
import subprocess
import sys

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from conftest import ROOT
from jobs import until
from spider.errors import Diverged, UsageError, one_line, printable, run_command


def raises(fault: BaseException):
    """Return a function that raises an exception, whatever its arguments."""

    def fail(*_):
        raise fault

    return fail


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
def test_expected_errors_print_one_line_and_set_the_exit_status(capsys, fault, status, line):
    assert run_command(raises(fault), "x.py", interrupted="stopped") == status
    assert capsys.readouterr() == ("", f"x.py: {line}\n")


def test_torchrun_report_ends_with_the_error_line(tmp_path, monkeypatch):
    file = tmp_path / "error.json"  # torchrun gives each rank one
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    run_command(raises(UsageError("give --target_tokens")), "x.py")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    *_, last, _ = str(ChildFailedError("x.py", {0: failure})).splitlines()
    assert last == "  traceback : error: give --target_tokens"


def test_unexpected_error_keeps_its_traceback():
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
def test_closed_standard_stream_is_not_replaced_by_a_file(tmp_path, closed, out, err):
    """A file in its place would receive what the program prints."""
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


def test_names_and_data_cannot_send_terminal_control_sequences():
    assert one_line("a\x1b[2J\r\n\u202e\udcff\u6f22") == "a\\x1b[2J\\r\\n\\u202e\\udcff\u6f22"
    ids = [257, *"a\\\n\u6f22".encode(), 0xE6, 256, 271]
    assert printable(ids) == "\\<BOS>a\\\\\\n\u6f22\\xe6\\<PAD>\\<271>"
    assert printable([194, 160]) != printable([160])  # U+00A0, and a byte that is no UTF-8


@pytest.mark.parametrize(
    "number, nohup",
    ((signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGHUP, []), (signal.SIGHUP, ["nohup"])),
)
def test_script_ended_by_a_signal_leaves_no_partial_output(tmp_path, number, nohup):
    """It waits for text on stdin. Under nohup it outlives its terminal."""
    out = tmp_path / "out"
    command = [*nohup, sys.executable, "data.py", "prepare", "-", "--out", out]
    job = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    until(lambda: out.exists() and len(os.listdir(out)) == 2)  # the lock, and a folder for shards
    job.send_signal(number)
    _, error = job.communicate(b"a text")
    assert job.returncode == (0 if nohup else 128 + number) and b"Traceback" not in error
    assert (os.listdir(out) == []) == (not nohup)
