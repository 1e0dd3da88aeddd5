"""sample.py: its output, its figures and its refusals, as a reader of a terminal or a pipe sees
them."""

import fcntl
import json
import math
import os
import pty
import subprocess
import sys
import termios
from contextlib import suppress

import numpy as np
import pytest
import torch

import sample
import spider_model
from conftest import ROOT, contents, final_state, metrics, refused
from spider.inference import count_characters, decoder_of, read_checkpoint
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID

CPU = torch.device("cpu")


def writes(monkeypatch, content: bytes, between=lambda: None):
    """Has any model write these bytes; `between` is called before each."""

    def generate_batch(*args, **kwargs):
        for byte in content:
            between()
            yield [byte]

    monkeypatch.setattr(Spider, "generate_batch", generate_batch)


def refusal(capsys, *argv) -> str:
    return refused(argv, capsys, program="sample.py", main=sample.main)


def measured(tmp_path, *argv) -> list[dict]:
    assert sample.main([*map(str, argv), "--json", str(tmp_path / "out.json")]) == 0
    return json.loads((tmp_path / "out.json").read_text())


# --------------------------------------------------------------------------------------------------
# Talking


def test_a_directory_stands_for_its_newest_checkpoint_that_is_intact(
    trained, tmp_path, monkeypatch, capsys
):
    for step in (1, 2, 3):
        (tmp_path / f"spider-step{step}.pt").write_bytes(
            (trained / f"spider-step{step}.pt").read_bytes()
        )
    os.truncate(tmp_path / "spider-step3.pt", 9000)
    assert sample.main([str(tmp_path), "--prompt", "", "--bytes", "1"]) == 0
    assert (
        f"{tmp_path / 'spider-step2.pt'}: the newest checkpoint in {tmp_path}, step 2\n"
        in capsys.readouterr().err
    )
    weight = decoder_of(read_checkpoint(str(tmp_path), Spider)[1], CPU, Spider).lm_head.weight
    assert torch.equal(
        weight, torch.load(trained / "spider-step2.pt")["model_state_dict"]["lm_head.weight"]
    )
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "spider-step1.pt").rename(tmp_path / "checkpoints" / "spider-step1.pt")
    monkeypatch.chdir(tmp_path)
    assert sample.main(["--prompt", "", "--bytes", "1"]) == 0  # the default directory


def test_a_loaded_model_takes_the_backend_that_auto_chooses_and_says_why(
    trained, monkeypatch, capsys
):
    monkeypatch.setattr(
        spider_model,
        "resolve_backend",
        lambda *asked, **more: ("loop", f"{asked[0]} on {asked[1]}"),
    )
    model = decoder_of(read_checkpoint(str(trained), Spider)[1], CPU, Spider)
    assert model.core.layers[0].moe.backend == "loop"
    assert sample.main([str(trained), "--prompt", "a", "--bytes", "1"]) == 0
    assert "auto on cpu" in capsys.readouterr().err


def test_what_a_terminal_would_obey_is_escaped_unless_raw_is_asked_for(
    trained, monkeypatch, capsysbinary
):
    content = (
        "a\x1b]0;t\x07\r\b\x7f\x9b2J\u202e\u2028\x00 b\tc\nd é漢🕸".encode() + b"\xff\x9b\xf0\x9f"
    )
    writes(monkeypatch, content)
    assert sample.main([str(trained), "--prompt", "\x1b[31mp", "--raw"]) == 0
    assert capsysbinary.readouterr().out == b"\x1b[31mp" + content + b"\n"
    assert sample.main([str(trained), "--prompt", "\x1b[31mp"]) == 0
    assert capsysbinary.readouterr().out.decode() == (
        "\\x1b[31mpa\\x1b]0;t\\x07\\r\\x08\\x7f\\x9b2J\\u202e\\u2028\\x00 b\tc\nd "
        "é漢🕸\ufffd\ufffd\ufffd\n"
    )


def test_text_is_streamed_as_whole_characters(trained, monkeypatch, capsysbinary):
    seen = []
    writes(
        monkeypatch,
        "é漢🕸\n".encode() + b"\xc3x",
        lambda: seen.append(sys.stdout.buffer.getvalue().decode()),
    )
    assert sample.main([str(trained), "--prompt", ""]) == 0
    assert seen == ["", "", *["é"] * 3, *["é漢"] * 4, "é漢🕸", "é漢🕸\n", "é漢🕸\n"]
    assert capsysbinary.readouterr().out.decode() == "é漢🕸\n\ufffdx\n"


def test_a_closed_pipe_ends_it_silently_and_a_full_disk_is_a_line(trained):
    argv = [
        ROOT / "sample.py",
        trained / "spider-step3.pt",
        "--bytes",
        "100000",
        "--prompt",
        "x" * 10,
    ]
    process = subprocess.Popen(
        [sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.read(1) == b"x"
    process.stdout.close()
    assert process.stderr.read() == b"sample.py: starting\n" and process.wait() == 0
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *argv, "--raw"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    imports = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    shown = [line for line in done.stderr.splitlines() if line not in imports]
    assert (done.returncode, shown) == (
        2,
        ["sample.py: starting", "sample.py: error: No space left on device"],
    )
    assert any("spider_model" in line for line in imports)
    assert not [line for line in imports if "torch._dynamo" in line]  # which takes a second


def test_standard_input_is_continued_byte_for_byte_like_a_prompt(trained, tmp_path, capsysbinary):
    argv = [str(trained), "--bytes", "4", "--raw", "--seed", "3"]
    kept = os.dup(0)
    try:
        for content in (b"abc\n", b"a\xffb", b""):
            (tmp_path / "stdin").write_bytes(content)
            with open(tmp_path / "stdin", "rb") as file:
                os.dup2(file.fileno(), 0)
            assert sample.main(argv) == 0
            written = capsysbinary.readouterr().out
            assert sample.main([*argv, "--prompt", os.fsdecode(content)]) == 0
            assert written == capsysbinary.readouterr().out and written.startswith(content)
            assert len(written) > len(content)
    finally:
        os.dup2(kept, 0)
        os.close(kept)


def test_samples_are_drawn_together_by_the_seed_and_printed_in_turn(trained, monkeypatch, capsys):
    argv = [str(trained), "--prompt", "ab", "--bytes", "30", "--temperature", "3", "--samples", "3"]

    def samples(*more):
        assert sample.main([*argv, *more]) == 0
        out = capsys.readouterr().out
        for number in (1, 2, 3):
            out = out.replace(f"--- {number} of 3\n", "---\n")
        first, *texts = out.split("---\n")
        assert first == "" and len(texts) == 3 and all(text.startswith("ab") for text in texts)
        return texts

    texts = samples()
    assert len(set(texts)) == 3 and samples() == texts and samples("--seed", "1") != texts
    assert len(set(samples("--temperature", "0"))) == 1 and len(set(samples("--top_k", "1"))) == 1
    assert len(set(samples("--top_p", "1e-9"))) == 1
    columns = [[97, 98], [None, 99], [None, 100]]  # the first sample ends
    sizes = []
    monkeypatch.setattr(
        Spider, "generate_batch", lambda *args: sizes.append(args[-1]) or iter(columns)
    )
    assert sample.main([str(trained), "--prompt", "x", "--samples", "2"]) == 0
    assert sizes == [64]  # no endless repetition by default
    assert capsys.readouterr().out == "--- 1 of 2\nxa\n--- 2 of 2\nxbcd\n"


@pytest.mark.parametrize(
    "content, stops, expected",
    (
        ("ab\n\ncd", ["\n\n"], "ab"),
        ("abcd", ["abcd"], ""),
        ("xabab", ["aba", "b"], "xa"),
        ("xabc", ["c", "abc"], "x"),
        ("aabac", ["aba"], "a"),
        ("abab", ["abc", "babb"], "abab"),
        ("é漢x", ["漢"], "é"),
        ("è", ["é"], "è"),
    ),
    ids=repr,
)
def test_a_sample_ends_before_the_first_stop_text(
    trained, monkeypatch, capsys, content, stops, expected
):
    writes(monkeypatch, content.encode())
    flags = [part for stop in stops for part in ("--stop", stop)]
    assert sample.main([str(trained), "--prompt", content, *flags]) == 0
    # a stop text in the prompt ends nothing
    assert capsys.readouterr().out == f"{content}{expected}\n"


def test_bytes_that_may_begin_a_stop_text_are_printed_once_that_is_decided(
    trained, monkeypatch, capsysbinary
):
    seen = []
    writes(
        monkeypatch,
        "a\nb\n\né!".encode() + b"\xc3x",
        lambda: seen.append(sys.stdout.buffer.getvalue().decode()),
    )
    assert sample.main([str(trained), "--prompt", "", "--stop", "\n\n\n", "--stop", "é?"]) == 0
    assert seen == ["", "a", "a", "a\nb", "a\nb", "a\nb", *["a\nb\n\n"] * 2, *["a\nb\n\né!"] * 2]
    assert capsysbinary.readouterr().out.decode() == "a\nb\n\né!\ufffdx\n"


def test_each_sample_ends_at_its_own_stop_text(trained, monkeypatch, capsys):
    taken = []

    def generate_batch(*args):
        for column in (
            [97, 46, 97],
            [46, 99, 98],
            [100, 100, None],
            [101, 46, None],
            [102, 102, None],
        ):
            taken.append(column)
            yield column

    monkeypatch.setattr(Spider, "generate_batch", generate_batch)
    assert sample.main([str(trained), "--prompt", "x", "--samples", "3", "--stop", "."]) == 0
    assert capsys.readouterr().out == "--- 1 of 3\nxa\n--- 2 of 3\nx\n--- 3 of 3\nxab\n"
    assert len(taken) == 3  # until all have ended


def test_no_echo_leaves_out_the_prompt_of_each_sample(trained, monkeypatch, capsysbinary):
    monkeypatch.setattr(Spider, "generate_batch", lambda *args: iter([[97, 98], [97, 98]]))
    argv = [str(trained), "--prompt", "prompt", "--no_echo"]
    assert sample.main([*argv, "--samples", "2"]) == 0
    assert capsysbinary.readouterr().out == b"--- 1 of 2\naa\n--- 2 of 2\nbb\n"
    writes(monkeypatch, b"\xa9\x1b")
    assert sample.main([*argv, "--raw"]) == 0
    assert capsysbinary.readouterr().out == b"\xa9\x1b\n"


def test_a_directory_names_the_checkpoint_with_a_lower_loss_than_its_newest(
    trained, tmp_path, capsys
):
    losses = {1: 1.25, 2: 2.0, 3: 1.5}
    for step in losses:
        state = torch.load(trained / f"spider-step{step}.pt")
        best = min(losses[earlier] for earlier in losses if earlier <= step)
        torch.save(
            state | dict(val_loss=losses[step], best_loss=best), tmp_path / f"spider-step{step}.pt"
        )

    def logged(*flags) -> str:
        assert sample.main([str(tmp_path), "--prompt", "", "--bytes", "1", *flags]) == 0
        return capsys.readouterr().err

    line = next(line for line in logged().splitlines() if "--best" in line)
    assert "spider-step1.pt" in line and "1.2500" in line and "1.5000" in line
    assert "add --best" not in logged("--best")
    (tmp_path / "spider-step1.pt").unlink()
    torch.save(state | dict(val_loss=None, best_loss=2.0), tmp_path / "spider-step3.pt")
    assert "spider-step2.pt has the lowest validation loss, 2.0000" in logged()
    torch.save(state | dict(val_loss=1.5, best_loss=1.25), tmp_path / "spider-step3.pt")
    assert "--best" not in logged()  # the best one was deleted
    (tmp_path / "spider-step2.pt").unlink()
    torch.save(state | dict(val_loss=None, best_loss=1.25), tmp_path / "spider-step3.pt")
    assert "--best" not in logged()
    torch.save(state | dict(val_loss=1.25, best_loss=1.25), tmp_path / "spider-step3.pt")
    (tmp_path / "spider-step2.pt").write_text("not opened, so no warning")
    assert "skipped" not in logged()


def test_a_terminal_is_a_dialogue_that_ctrl_c_ends_at_its_prompt(trained):
    ours, theirs = pty.openpty()

    def take_terminal():
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    argv = [sys.executable, ROOT / "sample.py", trained / "spider-step3.pt", "--bytes", "5"]
    process = subprocess.Popen(
        argv, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, preexec_fn=take_terminal
    )
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
    while process.poll() is None:
        # one that comes between the prompt and readline's waiting is not heard by it
        os.write(ours, b"\x03")
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=20)  # a second one would end a slow exit by the signal
    assert process.returncode == 130 and process.stderr.read() == b"sample.py: starting\n"
    os.close(ours)


def test_ctrl_c_ends_a_text_with_status_130(trained, monkeypatch, capsys):
    def generate_batch(*args, **kwargs):
        yield [97]
        raise KeyboardInterrupt

    monkeypatch.setattr(Spider, "generate_batch", generate_batch)
    assert sample.main([str(trained / "spider-step3.pt"), "--prompt", "x"]) == 130
    assert capsys.readouterr() == ("xa\n", "")


# --------------------------------------------------------------------------------------------------
# Evaluation


def test_a_prepared_directory_gives_the_figure_that_training_gave(trained, tmp_path):
    for batch in ((), ("--batch", 1), ("--batch", 4)):
        (found,) = measured(tmp_path, trained, "--eval", trained.parent / "data", *batch)
        exact = 1e-5 if batch else 1e-12
        assert found.pop("bits_per_byte") == pytest.approx(
            metrics(trained)[-1]["val_bpb"], rel=exact
        )
        assert found.pop("bits_per_character") == pytest.approx(
            metrics(trained)[-1]["val_bpb"], rel=exact
        )
        assert found == dict(
            checkpoint=str(trained / "spider-step3.pt"),
            file=str(trained.parent / "data"),
            bytes=299,
            characters=299,
            n_loops=2,
            seq_len=32,
            precision=found["precision"],
            adapt=False,
        )


def test_bits_are_those_of_the_bytes_alone_the_first_of_each_document_predicted_from_bos(
    trained, tmp_path
):
    """Documents of each kind of file, within a window and longer than it; beside a sum by hand."""
    texts, bits, count = ("abc de\xe9", "f", "gh abcdef " * 5), 0.0, 0
    model = decoder_of(read_checkpoint(str(trained), Spider)[1], CPU, Spider)
    for text in texts:
        ids = torch.tensor([[BOS_ID, *text.encode()]])
        with torch.no_grad():
            bits += (
                float(model(ids[:, :-1], ids[:, 1:], n_loops=2).nats_per_byte)
                * (ids.shape[1] - 1)
                / math.log(2)
            )
        count += len(text.encode())
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(dict(words=text)) + "\n" for text in texts)
    )
    np.array([i for text in texts for i in (BOS_ID, *text.encode(), EOS_ID)], "<u2").tofile(
        tmp_path / "a.bin"
    )
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.md").write_text(text)
    paths = [tmp_path / name for name in ("a.jsonl", "a.bin", "0.md", "1.md", "2.md")]
    flags = "--field", "words", "--seq_len", 99, "--precision", "fp32"
    *whole, first, second, third = measured(tmp_path, trained, "--eval", *paths, *flags)
    for found in whole:
        assert found["bytes"] == count and found["bits_per_byte"] == pytest.approx(
            bits / count, rel=1e-5
        )
    alone = [found["bytes"] * found["bits_per_byte"] for found in (first, second, third)]
    assert sum(alone) == pytest.approx(bits, rel=1e-5)


def test_checkpoints_texts_and_loops_stand_side_by_side_in_a_table(trained, tmp_path, capsys):
    (tmp_path / "a\x1b.txt").write_text("abc def")
    first, last = (trained / f"spider-step{step}.pt" for step in (1, 3))
    found = measured(
        tmp_path,
        first,
        last,
        "--n_loops",
        "2,1",
        "--eval",
        tmp_path / "a\x1b.txt",
        trained.parent / "data",
    )
    assert [(entry["checkpoint"], entry["n_loops"]) for entry in found] == [
        (str(path), n) for path in (first, last) for _ in range(2) for n in (2, 1)
    ]
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["checkpoint", "file", "bytes", "n_loops=2", "n_loops=1"]
    assert (
        len(lines) == 4
        and {len(line) for line in lines} == {len(head)}
        and all(map(str.isprintable, lines))
    )
    for i, line in enumerate(lines):
        assert [float(part) for part in line.split()[-2:]] == [
            round(entry["bits_per_byte"], 4) for entry in found[2 * i : 2 * i + 2]
        ]


@pytest.mark.parametrize("adapt", ((), ("--adapt",)), ids=str)
def test_bits_per_character_divide_the_same_bits_by_code_points_and_bytes_that_are_not_utf_8(
    trained, tmp_path, adapt
):
    documents = ("aé漢🕸".encode(), b"\xff\xe6\xbc", "漢".encode()[:1], "漢字".encode())
    characters = 4 + 3 + 1 + 2
    data = tmp_path / "data"
    data.mkdir()
    ids = np.array([i for text in documents for i in (BOS_ID, *text, EOS_ID)], "<u2")
    for name in ("train-0.bin", "val-0.bin"):
        ids.tofile(data / name)
    file, directory = measured(tmp_path, trained, "--eval", data / "val-0.bin", data, *adapt)
    bytes = sum(map(len, documents))
    assert (file["bytes"], file["characters"]) == (bytes, characters)
    specials = 2 * len(documents) - 1  # all but the first BOS are predicted
    assert (directory["bytes"], directory["characters"]) == (
        bytes + specials,
        characters + specials,
    )
    for found in (file, directory):
        bits = found["bits_per_byte"] * found["bytes"]
        assert found["bits_per_character"] * found["characters"] == pytest.approx(bits)


def test_characters_are_counted_across_the_pieces_in_which_a_text_is_read():
    ids = np.frombuffer("aé漢🕸".encode(), np.uint8)
    for size in range(1, 6):
        assert (
            count_characters([ids[i : i + size] for i in range(0, len(ids), size)], special=True)
            == 4
        )


def test_bits_per_character_are_columns_of_their_own_where_they_differ_from_bits_per_byte(capsys):
    entry = dict(
        checkpoint="a",
        file="f",
        bytes=9,
        characters=9,
        n_loops=1,
        bits_per_byte=2.0,
        bits_per_character=2.0,
    )
    sample.print_table([entry])
    assert "characters" not in capsys.readouterr().out
    sample.print_table([entry, entry | dict(file="g", characters=1_234, bits_per_character=6.0)])
    head, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["checkpoint", "file", "bytes", "n_loops=1", "characters", "n_loops=1"]
    assert lines == [
        ["a", "f", "9", "2.0000", "9", "2.0000"],
        ["a", "g", "9", "2.0000", "1,234", "6.0000"],
    ]


def test_checkpoints_of_other_numbers_of_loops_have_columns_of_their_own(capsys):
    entry = dict(
        checkpoint="a", file="f", bytes=9, n_loops=1, bits_per_byte=2.0, bits_per_character=2.0
    )
    sample.print_table(
        [entry, entry | dict(checkpoint="b", n_loops=3, bits_per_byte=4.0, bits_per_character=4.0)]
    )
    head, first, second = capsys.readouterr().out.splitlines()
    assert first.index("2.0000") + 6 == head.index("n_loops=1") + 9
    assert second.index("4.0000") + 6 == head.index("n_loops=3") + 9


def test_what_cannot_be_measured_is_one_line(trained, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no.jsonl").write_text('{"a": 1}\n')
    (tmp_path / "bare").mkdir()
    np.array([97], "<u2").tofile(tmp_path / "one.bin")
    np.array([97, 300], "<u2").tofile(tmp_path / "odd.bin")
    for name in ("gone.txt", "empty.txt", "no.jsonl", "bare", "one.bin", "odd.bin"):
        assert name in refusal(capsys, trained, "--eval", tmp_path / name)
    (tmp_path / "a.txt").write_text("abc")
    assert "gone" in refusal(capsys, tmp_path / "gone", "--eval", tmp_path / "a.txt")
    for out, said in (
        (tmp_path / "no" / "out", "No such file"),
        (tmp_path, "not a regular"),
        ("/dev/null", "not a"),
    ):
        line = refusal(capsys, "no checkpoint", "--eval", tmp_path / "a.txt", "--json", out)
        assert said in line and "no checkpoint" not in line  # known before minutes of work


# --------------------------------------------------------------------------------------------------
# Refusals


def test_what_is_no_checkpoint_is_named(trained, tmp_path, monkeypatch, capsys):
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    for name in ("text.pt", "empty", "gone.pt"):
        assert name in refusal(capsys, tmp_path / name)
    assert "a\\x1b[2J\\nb" in refusal(capsys, tmp_path / "a\x1b[2J\nb")
    monkeypatch.chdir(tmp_path)
    assert "checkpoints: there is no usable checkpoint" in refusal(capsys)


@pytest.mark.parametrize("value", (math.inf, math.nan))
def test_a_ruined_weight_is_one_line_from_every_command(trained, tmp_path, capsys, value):
    state = final_state(trained)
    state["model_state_dict"]["lm_head.weight"][0, 0] = value
    torch.save(state, tmp_path / "ruined.pt")
    (tmp_path / "a.txt").write_text("abc")
    for argv in (
        ["--prompt", "abc"],
        ["--eval", tmp_path / "a.txt"],
        ["--eval", tmp_path / "a.txt", "--adapt"],
        ["--eval", trained.parent / "data"],
        ["--show", "abc"],
    ):
        assert sample.main([*map(str, (tmp_path / "ruined.pt", *argv))]) == 2
        assert "its weights are ruined" in capsys.readouterr().err.splitlines()[-1]


def test_out_of_memory_is_one_line_with_the_remedy(trained, tmp_path, monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory")

    (tmp_path / "a.txt").write_text("abc")
    monkeypatch.setattr(Spider, "step", fail)
    monkeypatch.setattr(Spider, "forward", fail)
    assert "lower --samples" in refusal(capsys, trained, "--prompt", "x", "--samples", "65536")
    assert "lower --batch" in refusal(capsys, trained, "--eval", tmp_path / "a.txt")


@pytest.mark.parametrize(
    "argv, words",
    (
        ("--eval a.txt --show abc", "--show"),
        ("--show abc --export new", "--export"),
        ("--json out", "--json"),
        ("--show abc --json out", "--json"),
        ("--eval a.txt --html out", "--html"),
        ("--eval a.txt --samples 3", "--samples"),
        ("--show abc --prompt x", "--prompt"),
        ("--export new --raw", "--raw"),
        ("--export new --n_loops 2", "--n_loops"),
        ("--prompt a --adapt", "--adapt"),
        ("--eval a.txt --adapt --seq_len 64", "--seq_len"),
        ("b --prompt a", "several checkpoints"),
        ("--prompt a --n_loops 1,2", "numbers of loops"),
        ("--adapt", "--adapt needs --eval"),
        ("--prompt x --html x.html", "--html needs --show"),
        ("--eval a.txt --no_echo", "--no_echo"),
        ("--stop=", "--stop"),
        ("--bytes 0", "--bytes"),
        ("--eval a.txt --seq_len 4e18", "--seq_len"),
        ("--n_loops 4097", "--n_loops"),
        ("--temperature nan", "--temperature"),
        ("--top_p 0", "--top_p"),
        ("--top_k -1", "--top_k"),
    ),
)
def test_a_bad_value_or_a_flag_that_would_not_be_read_is_refused_and_nothing_is_done(
    trained, tmp_path, monkeypatch, capsys, argv, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("abc")
    before = contents(trained)
    assert words in refusal(capsys, trained, *argv.split())
    assert contents(tmp_path) == {"a.txt": b"abc"} and contents(trained) == before


def test_a_mistyped_flag_is_answered_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = subprocess.run(
        [sys.executable, ROOT / "sample.py", "--promt", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | dict(PYTHONPATH=str(tmp_path)),
    )
    assert done.returncode == 2 and done.stderr.startswith(
        "sample.py: error: unrecognized arguments: --promt"
    )
