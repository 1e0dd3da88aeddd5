"""Output and refusals of sample.py, as a reader of a terminal or a pipe sees them."""

import fcntl
import math
import os
import pty
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import sample
from conftest import ROOT, contents, final_state, make_shards, run
from spider.inference.loading import load_model
from spider_model import Spider


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The directory of a run of three steps with a checkpoint of each."""
    root = tmp_path_factory.mktemp("trained")
    return run(root, make_shards(root / "data"), "--ckpt_every", "1", "--keep_last", "3", steps=3)


def writes(monkeypatch, content: bytes, between=lambda: None):
    """Has any model write these bytes; `between` is called before each."""
    def go_on(*args, **kwargs):
        for byte in content:
            between()
            yield [byte]
    monkeypatch.setattr(Spider, "generate_batch", go_on)


def refusal(capsys, *argv) -> str:
    """The one line on stderr of a command that is refused with status 2 and prints nothing else."""
    assert sample.main([*map(str, argv)]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if line.startswith("sample.py: error: ")]
    assert len(lines) == 1 and err.endswith(lines[0] + "\n") and all(line.isprintable() for line in err.splitlines())
    return lines[0]


@pytest.fixture
def stdin(tmp_path):
    """Put text into standard input, in place of what pytest puts there."""
    kept = os.dup(0)

    def hold(content: bytes):
        (tmp_path / "stdin").write_bytes(content)
        with open(tmp_path / "stdin", "rb") as file:
            os.dup2(file.fileno(), 0)
    yield hold
    os.dup2(kept, 0)
    os.close(kept)


# ---------------------------------------------------------------------------------------------------------------------
# Talking

def test_a_directory_stands_for_its_newest_checkpoint_that_is_intact(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "checkpoints").mkdir()
    for step in (1, 2, 3):
        (tmp_path / f"spider-step{step}.pt").write_bytes((trained / f"spider-step{step}.pt").read_bytes())

    def step_of(path):
        weight = load_model(str(path), torch.device("cpu"), Spider)[0].lm_head.weight
        return [step for step in (1, 2, 3) if torch.equal(weight, heads[step])]
    heads = {step: torch.load(trained / f"spider-step{step}.pt")["model_state_dict"]["lm_head.weight"]
             for step in (1, 2, 3)}
    assert step_of(tmp_path / "spider-step2.pt") == [2] and step_of(tmp_path) == [3]
    os.truncate(tmp_path / "spider-step3.pt", 9000)
    assert step_of(tmp_path) == [2]
    (tmp_path / "spider-step2.pt").unlink()
    os.mkfifo(tmp_path / "spider-step2.pt")
    assert step_of(tmp_path) == [1]
    assert sample.main([str(tmp_path), "--prompt", "", "--bytes", "1"]) == 0
    err = capsys.readouterr().err
    assert f"{tmp_path / 'spider-step1.pt'}: the newest checkpoint in {tmp_path}, step 1\n" in err
    assert "step2.pt is not a checkpoint that can be read safely: it is not a regular" in err
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spider-step1.pt").rename(tmp_path / "checkpoints" / "spider-step1.pt")
    assert sample.main(["--prompt", "", "--bytes", "1"]) == 0


def test_what_a_terminal_would_obey_is_escaped_unless_raw_is_asked_for(trained, monkeypatch, capsysbinary):
    content = "a\x1b]0;t\x07\r\b\x7f\x9b2J\u202e\u2028\x00 b\tc\nd é漢🕸".encode() + b"\xff\x9b\xf0\x9f"
    writes(monkeypatch, content)
    for raw in ((), ("--raw",)):
        assert sample.main([str(trained), "--prompt", "\x1b[31mp", *raw]) == 0
        out, err = capsysbinary.readouterr()
        if raw:
            assert out == b"\x1b[31mp" + content + b"\n"
        else:
            assert out.decode() == ("\\x1b[31mpa\\x1b]0;t\\x07\\r\\x08\\x7f\\x9b2J\\u202e\\u2028\\x00 b\tc\nd é漢🕸"
                                    "\ufffd\ufffd\ufffd\n")


def test_text_is_streamed_as_whole_characters(trained, monkeypatch, capsysbinary):
    seen = []
    writes(monkeypatch, "é漢🕸\n".encode() + b"\xc3x", lambda: seen.append(sys.stdout.buffer.getvalue().decode()))
    assert sample.main([str(trained), "--prompt", ""]) == 0
    assert seen == ["", "", *["é"] * 3, *["é漢"] * 4, "é漢🕸", "é漢🕸\n", "é漢🕸\n"]
    assert capsysbinary.readouterr().out.decode() == "é漢🕸\n\ufffdx\n"


def test_a_reader_that_leaves_ends_it_without_a_word_and_a_full_disk_is_a_line(trained):
    argv = [sys.executable, ROOT / "sample.py", trained / "spider-step3.pt", "--bytes", "100000", "--prompt", "x" * 10]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.stderr.read() == b"" and process.wait() == 0
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*argv, "--raw"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "sample.py: error: No space left on device\n")


def test_what_is_no_checkpoint_is_named_and_never_waited_for(trained, tmp_path, monkeypatch, capsys):
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    for name, said in (("pipe.pt", "not a regular file"), ("text.pt", "checksum"),
                       ("empty", "there is no usable checkpoint"), ("gone.pt", "there is no usable checkpoint"),
                       ("a\x1b[2J\nb", "a\\x1b[2J\\nb")):
        line = refusal(capsys, tmp_path / name)
        assert said in line and (name in line or not name.isprintable())
    assert "/dev/zero" in refusal(capsys, "/dev/zero")
    assert "b\\x1b" in refusal(capsys, trained, "--b\x1b")                # argparse's own words
    assert "b\\x1b: only --eval allows several checkpoints" in refusal(capsys, trained, "b\x1b")
    assert "--n_loops" in refusal(capsys, trained, "--n_loops", "4097")
    assert "'x' is not a number" in refusal(capsys, trained, "--temperature", "x")
    assert "above 0 and at most 1" in refusal(capsys, trained, "--top_p", "0")
    assert "only --eval allows several numbers" in refusal(capsys, trained, "--n_loops", "1,2", "--prompt", "a")
    monkeypatch.chdir(tmp_path)
    assert "checkpoints: there is no usable checkpoint" in refusal(capsys)


def test_a_checkpoint_of_other_classes_is_refused_unless_its_class_is_given(trained, tmp_path, capsys):
    class Other(Spider):
        pass
    name = f"{__name__}.{Other.__qualname__}"
    torch.save(final_state(trained) | dict(classes=[name]), path := tmp_path / "spider-step3.pt")
    assert f"its model uses {name}" in refusal(capsys, path, "--prompt", "a")
    assert type(load_model(str(path), torch.device("cpu"), Other)[0]) is Other


@pytest.mark.parametrize("value", (math.inf, -math.inf, math.nan))
def test_one_number_that_is_not_finite_in_a_weight_is_reported_or_does_no_harm(trained, tmp_path, capsys, value):
    model, _ = load_model(str(trained), torch.device("cpu"), Spider)
    ruined = set()
    for name, weight in model.state_dict().items():
        if weight.is_floating_point():
            first = weight.view(-1)[0].clone()
            weight.view(-1)[0] = value
            try:
                list(model.generate([257, *b"abc def"], 3, 0.8))
            except FloatingPointError:
                ruined.add(name)
            weight.view(-1)[0] = first
    assert "lm_head.weight" in ruined and len(ruined) > 20
    state = final_state(trained)
    state["model_state_dict"]["lm_head.weight"][0, 0] = value
    torch.save(state, tmp_path / "ruined.pt")
    assert "its weights are ruined" in refusal(capsys, tmp_path / "ruined.pt")


def test_any_temperature_above_0_draws(trained):
    model, _ = load_model(str(trained), torch.device("cpu"), Spider)
    for temperature in (5e-324, 1e-30, 1.0, 1e300):
        generator = torch.Generator().manual_seed(0)
        drawn = list(model.generate([257, 97], 5, temperature, generator=generator))
        assert len(drawn) <= 5 and all(0 <= byte < 256 for byte in drawn)
        if temperature < 1e-20:
            assert drawn == list(model.generate([257, 97], 5, 0))


def test_without_a_prompt_standard_input_is_one_byte_for_byte(trained, stdin, capsysbinary):
    for content in (b"abc\n", b"a\xffb", b""):
        stdin(content)
        assert sample.main([str(trained), "--bytes", "4", "--raw", "--seed", "3"]) == 0
        written = capsysbinary.readouterr().out
        assert sample.main([str(trained), "--bytes", "4", "--raw", "--seed", "3",
                            "--prompt", os.fsdecode(content)]) == 0
        assert written == capsysbinary.readouterr().out and written.startswith(content) and len(written) > len(content)


def test_several_samples_of_a_prompt_are_drawn_together_and_printed_one_after_the_other(trained, capsys):
    argv = [str(trained), "--prompt", "ab", "--bytes", "30", "--temperature", "3", "--samples", "3"]

    def parts(*more):
        assert sample.main([*argv, *more]) == 0
        out = capsys.readouterr().out
        first, *texts = out.replace("--- 2 of 3\n", "--- 1 of 3\n").replace("--- 3 of 3\n", "--- 1 of 3\n").split(
            "--- 1 of 3\n")
        assert first == "" and len(texts) == 3 and all(text.startswith("ab") for text in texts)
        return texts
    texts = parts()
    assert len(set(texts)) == 3 and parts() == texts and parts("--seed", "1") != texts
    assert len(set(parts("--temperature", "0"))) == 1


def test_a_sample_that_has_ended_is_no_longer_than_that(trained, monkeypatch, capsys):
    columns = [[97, 98], [None, 99], [None, 100]]
    monkeypatch.setattr(Spider, "generate_batch", lambda *args: iter(columns))
    assert sample.main([str(trained), "--prompt", "x", "--samples", "2"]) == 0
    assert capsys.readouterr().out == "--- 1 of 2\nxa\n--- 2 of 2\nxbcd\n"


def test_a_terminal_is_a_dialogue_that_ctrl_c_ends_at_its_prompt(trained):
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    argv = [sys.executable, ROOT / "sample.py", trained / "spider-step3.pt", "--bytes", "5"]
    process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, preexec_fn=take_terminal)
    os.close(theirs)

    def until_asked() -> bytes:
        out = b""
        while not out.endswith(b"> "):
            out += os.read(ours, 100)
        return out
    greeting = until_asked()
    assert b"spider-step3.pt, step 3. " in greeting and b"Ctrl-D quits." in greeting
    os.write(ours, b"ab\n")
    assert until_asked().startswith(b"ab\r\n")
    while process.poll() is None:         # one that comes between the prompt and readline's waiting is not heard by it
        os.write(ours, b"\x03")
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)
    assert process.returncode == 130 and process.stderr.read() == b""
    os.close(ours)


def test_ctrl_c_ends_a_text_with_status_130(trained, monkeypatch, capsys):
    def go_on(*args):
        yield [97]
        raise KeyboardInterrupt
    monkeypatch.setattr(Spider, "generate_batch", go_on)
    assert sample.main([str(trained / "spider-step3.pt"), "--prompt", "x"]) == 130
    assert capsys.readouterr() == ("xa\n", "")


@pytest.mark.parametrize("top_p", (5e-324, 1e-308, 1e-50, 1e-46))
def test_any_top_p_above_0_draws_and_leaves_the_likeliest(trained, top_p):
    model, _ = load_model(str(trained), torch.device("cpu"), Spider)
    assert list(model.generate([257, 97], 5, top_p=top_p)) == list(model.generate([257, 97], 5, 0))


@pytest.mark.parametrize("fault", (MemoryError(), RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory")))
def test_want_of_memory_is_one_line_with_the_remedy(trained, tmp_path, monkeypatch, capsys, fault):
    def fail(*args, **kwargs):
        raise fault
    (tmp_path / "a.txt").write_text("abc")
    for name, flags, remedy in (("step", ("--prompt", "x", "--samples", "65536"), "lower --samples (now 65536) or "),
                                ("forward", ("--eval", tmp_path / "a.txt"), "--batch"),
                                ("step", ("--show", "abc"), "machine")):
        with monkeypatch.context() as patch:
            patch.setattr(Spider, name, fail)
            line = refusal(capsys, trained, *flags)
        assert "out of memory" in line and remedy in line


# ---------------------------------------------------------------------------------------------------------------------
# What is read by what

@pytest.mark.parametrize("argv, said", (
    ("--eval a.txt --show abc", "--eval and --show: one at a time"),
    ("--show abc --export new", "--show and --export: one at a time"),
    ("--eval a.txt --export new", "--eval and --export: one at a time"),
    ("--json out", "--json applies to --eval"), ("--show abc --json out", "--json applies to --eval, not to --show"),
    ("--html out", "--html applies to --show"), ("--eval a.txt --html out", "--html applies to --show, not to --eval"),
    ("--export new --html out", "--html applies to --show, not to --export"),
    ("--eval a.txt --samples 3", "--samples applies to talking, not to --eval"),
    ("--eval a.txt --prompt x", "--prompt applies to talking, not to --eval"),
    ("--show abc --prompt x", "--prompt applies to talking, not to --show"),
    ("--export new --raw", "--raw applies to talking, not to --export"),
    ("--show abc --top_k 4", "--top_k applies to talking"), ("--show abc --top_p 0.5", "--top_p applies to talking"),
    ("--show abc --seed 0", "--seed applies to talking"), ("--show abc --bytes 500", "--bytes applies to talking"),
    ("--eval a.txt --temperature 0.8", "--temperature applies to talking"),
    ("--prompt x --field text", "--field applies to --eval"),
    ("--prompt x --seq_len 64", "--seq_len applies to --eval"),
    ("--show abc --batch 4", "--batch applies to --eval"), ("--prompt x --precision auto", "--precision applies to"),
    ("--export new --n_loops 2", "--n_loops applies to talking or --eval or --show, not to --export"),
    ("--export new --device cpu", "--device applies to talking or --eval or --show, not to --export")))
def test_a_flag_that_would_not_be_read_is_refused_and_nothing_is_done(trained, tmp_path, monkeypatch, capsys, argv,
                                                                      said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("abc")
    before = contents(trained)
    assert said in refusal(capsys, trained, *argv.split())
    assert contents(tmp_path) == {"a.txt": b"abc"} and contents(trained) == before


def test_every_flag_is_read_by_something_and_its_default_is_no_flag_that_was_given():
    parsed = vars(sample.parse_args([]))
    assert parsed.keys() - {"checkpoint", "eval", "show", "export", "convert"} == {
        name for flags in sample.READ_BY.values() for name in flags}
    assert parsed | dict(bytes=500, temperature=0.8, samples=1, seed=0, raw=False, field="text", device="auto",
                         precision="auto", prompt=None, checkpoint=["checkpoints"]) == parsed
