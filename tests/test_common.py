"""What all scripts share: one line for an expected error, flags, files that are whole or not
there."""

import argparse
import errno
import fcntl
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from conftest import ROOT, contents
from spider import common, noise
from spider.common import (
    DataError,
    Diverged,
    Parser,
    UsageError,
    durable,
    integer,
    locked,
    one_line,
    printable,
    quoted,
    real,
    run_program,
)

# --------------------------------------------------------------------------------------------------
# Errors and the terminal


@pytest.mark.parametrize(
    "fault, status, line",
    (
        (UsageError("no\nsuch"), 2, "error: no\\nsuch"),
        (DataError("a: bad"), 2, "error: a: bad"),
        (Diverged("lower --lr"), 1, "error: lower --lr"),
        (FileNotFoundError(2, "No such file", "x"), 2, "error: x: No such file"),
        (KeyboardInterrupt(), 130, "stopped"),
        (FloatingPointError("inf"), 2, "error: inf"),
    ),
)
def test_an_expected_error_is_one_line_and_a_status(capsys, fault, status, line):
    def fail():
        raise fault

    assert status == run_program(fail, "x.py", interrupted="stopped")
    assert capsys.readouterr() == ("", f"x.py: {line}\n")
    if type(fault) is UsageError:  # another rank prints it
        assert (
            run_program(fail, "x.py", silent=(UsageError,)) == 2 and capsys.readouterr().err == ""
        )


def test_an_error_that_nobody_expects_keeps_its_traceback():
    def fail():
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        run_program(fail, "x.py")
    assert run_program(lambda: None, "x.py") == 0 and run_program(lambda: 3, "x.py") == 3


@pytest.mark.parametrize("closed", (">&-", "2>&-", "<&- >&- 2>&-"))
def test_no_file_takes_the_place_of_a_stream_that_the_caller_closed(tmp_path, closed):
    """Else what a program prints would be written into one of its own files."""
    program = f"""
import sys
from spider.common import note, run_program, say
def work():
    with open({str(tmp_path / "a")!r}, "w", buffering=1) as file:
        file.write("own")
        say("out")
        note("err")
        import os
        os.write(2, b"signal")
sys.exit(run_program(work, "x.py"))"""
    done = subprocess.run(
        f"{sys.executable} -c {shlex.quote(program)} {closed}",
        shell=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and (tmp_path / "a").read_text() == "own"
    assert (done.stdout, done.stderr) == (
        "out\n" * (">&-" not in closed.split()),
        "err\nsignal" * ("2" not in closed),
    )


def test_names_and_data_cannot_control_the_terminal():
    assert one_line("a\x1b[2J\r\n\u202e\udcff\u6f22") == "a\\x1b[2J\\r\\n\\u202e\\udcff\u6f22"
    assert (
        printable([257, *"a\\\n\u6f22".encode(), 0xE6, 256, 271])
        == "\\<BOS>a\\\\\\n\u6f22\\xe6\\<PAD>\\<271>"
    )


# --------------------------------------------------------------------------------------------------
# Flags


def test_a_parser_tells_given_flags_from_defaults_and_takes_values_of_other_sources():
    parser = Parser(prog="x.py")
    parser.add_argument("--lr", type=real(0, 1), default=0.5)
    parser.add_argument("--loud", action="store_true")
    parser.add_argument("--warm", action=argparse.BooleanOptionalAction, default=True)
    assert (
        parser.given(["--lr", "0.5", "--no-warm"]) == dict(lr=0.5, warm=False)
        and parser.given([]) == {}
    )
    assert parser.value("lr", "0.25", "LR=0.25") == dict(lr=0.25)
    assert parser.value("warm", False, "a.toml") == dict(warm=False)
    assert (
        parser.value("loud", True, "a.toml") == dict(loud=True)
        and parser.value("loud", False, "a.toml") == {}
    )
    with pytest.raises(UsageError, match="^LR=7: argument --lr: '7' is not a number"):
        parser.value("lr", "7", "LR=7")
    with pytest.raises(UsageError, match="see python x.py --help"):
        parser.parse_args(["--lo"])


@pytest.mark.parametrize(
    "parse, good, bad",
    (
        (
            integer(1, 4096),
            {"1": 1, "4e3": 4000, "4096": 4096},
            ("0", "4097", "1.5", "x", "", "inf", "nan", "1" * 5000),
        ),
        (
            integer(0),
            {"0": 0, "10e9": 10**10, str((1 << 62) - 1): (1 << 62) - 1},
            ("-1", "4.7e18", "\u00b2"),
        ),
        (real(0), {"0": 0.0, "1e30": 1e30}, ("-1", "inf", "nan", "x", "1e400")),
        (real(0, 1000, above=True), {"1e-3": 1e-3, "1000": 1000.0}, ("0", "1001")),
    ),
)
def test_numbers_are_taken_within_their_bounds(parse, good, bad):
    assert {text: parse(text) for text in good} == good
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError):
            parse(text)


@pytest.mark.parametrize(
    "name", ("my dir; touch X", "x$(touch P).gz", "-x", "-a b", "a'b", "plain/name.pt", "a\\b")
)
def test_a_quoted_path_is_one_word_of_a_shell_and_no_flag(name):
    (word,) = shlex.split(quoted(Path(name)))
    assert not word.startswith("-") and os.path.normpath(word) == os.path.normpath(name)
    assert (
        subprocess.run(
            f"printf %s {quoted(name)}", shell=True, capture_output=True, text=True
        ).stdout
        == word
    )


# --------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("where", ("writing", "replace"))
def test_a_durable_file_that_fails_leaves_the_old_one_and_nothing_else(
    tmp_path, monkeypatch, where
):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail if where == "replace" else os.replace)
    (tmp_path / "a").write_text("old")
    with pytest.raises(OSError, match="No space left"), durable(tmp_path / "a") as file:
        file.write("new")
        if where == "writing":
            fail()
    assert contents(tmp_path) == {"a": b"old"}


@pytest.mark.parametrize("name", (".", "folder", "pipe", "link"))
def test_a_durable_file_replaces_no_directory_pipe_or_device(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file") as fault, durable(Path(name)) as file:
        file.write("new")
    assert fault.value.filename == name and sorted(os.listdir(tmp_path)) == [
        "folder",
        "link",
        "pipe",
    ]


def test_a_durable_file_writes_through_no_link_and_has_the_permissions_of_any_new_file(
    tmp_path, monkeypatch
):
    """However long somebody watches the names of temporary files, none of them is written to
    again."""
    (tmp_path / "victim").write_text("old")
    names = []
    for content in "ab":
        with durable(tmp_path / "a") as file:
            names.append(Path(file.name).name)
            file.write(content)
        (tmp_path / names[-1]).symlink_to("victim")
    (tmp_path / ".a.tmp").symlink_to("victim")
    with durable(tmp_path / "a") as file:
        file.write("c")
    (tmp_path / "plain").touch()
    assert names[0] != names[1] and (tmp_path / "victim").read_text() == "old"
    assert (tmp_path / "a").read_text() == "c" and not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode

    # guessed after all
    monkeypatch.setattr(common.secrets, "token_hex", lambda _: names[0].split(".")[2])
    with pytest.raises(FileExistsError), durable(tmp_path / "a") as file:
        file.write("d")
    assert (tmp_path / "victim").read_text() == "old" and (tmp_path / "a").read_text() == "c"


def test_a_durable_file_that_cannot_be_opened_is_named_as_the_user_does(tmp_path):
    with pytest.raises(FileNotFoundError) as fault, durable(tmp_path / "none" / "a"):
        pass
    assert fault.value.filename == str(tmp_path / "none" / "a")


def test_two_writers_of_a_durable_file_at_once_leave_a_whole_one(tmp_path):
    for last in "ab":
        with ExitStack() as first, ExitStack() as second:
            files = dict(
                a=first.enter_context(durable(tmp_path / "c")),
                b=second.enter_context(durable(tmp_path / "c")),
            )
            for name, file in files.items():
                file.write(name * 100_000)
            for stack in (second, first) if last == "a" else (first, second):
                stack.close()
        assert (tmp_path / "c").read_text() == last * 100_000


@pytest.mark.parametrize(
    "kernel, wanted",
    (
        ("6.8.0-45-generic", "expandable_segments:True"),
        ("6.18.33.2-microsoft-standard-WSL2", None),
        ("4.4.0-19041-Microsoft", None),
    ),
)
def test_the_allocator_extends_segments_but_not_on_wsl_where_drivers_refuse_that(
    kernel, wanted, monkeypatch
):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("platform.release", lambda: kernel)
    common.set_allocator()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == wanted


def test_step_seeds_differ_by_seed_step_and_purpose():
    seeds = {
        noise.step_seed(seed, step, purpose)
        for seed in range(3)
        for step in range(9)
        for purpose in "ab"
    }
    assert len(seeds) == 54 and max(seeds) < 1 << 62


# --------------------------------------------------------------------------------------------------
# Locks


def test_a_lock_excludes_others_and_leaves_no_file(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            assert all(name.startswith(".") for name in os.listdir(tmp_path))
            with (
                pytest.raises(UsageError, match=f"^{tmp_path}: another process is using it"),
                locked(tmp_path),
            ):
                pass
            with locked(tmp_path, tmp_path / ".another"):
                pass
        assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL))
def test_a_file_system_without_locks_is_noted_and_nothing_stays_that_could_block_the_next_run(
    tmp_path, monkeypatch, capsys, number
):
    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert "cannot be locked" in capsys.readouterr().err
        (tmp_path / ".lock").write_bytes(b"")  # as that of a killed process
    with locked(tmp_path):
        pass
    assert os.listdir(tmp_path) == []


def test_a_lock_follows_no_link_and_a_file_that_cannot_be_opened_is_one_line(tmp_path, capsys):
    (tmp_path / "victim").write_text("x")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / ".lock").symlink_to(tmp_path / "victim")
    (tmp_path / "blocked" / ".lock").mkdir(parents=True)
    for name in ("linked", "blocked"):

        def work(name=name):
            with locked(tmp_path / name):
                pass

        assert run_program(work, "x.py") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"x.py: error: {tmp_path}/{name}")
    assert (tmp_path / "victim").read_text() == "x"
