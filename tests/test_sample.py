"""sample.py: what a terminal or a pipe shows: text, figures and errors."""

import builtins
import gzip
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sample
from conftest import ROOT, SMALL, final_state, make_shards, metrics, refused, run
from preparing import stream, write_shard
from spider.config import SpiderConfig
from spider.inference import adapt, load, sampling
from spider.inference.load import decoder_of, read_checkpoint
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID

CPU = torch.device("cpu")


def run_sample(capsys, *argv):
    """Run sample.py; return what it prints as `out` and `err`."""
    assert sample.main([*map(str, argv)]) == 0
    return capsys.readouterr()


@pytest.fixture
def writes(monkeypatch):
    """Make every model generate these columns of bytes; return the list of columns consumed."""

    def have_written(columns, before_each=lambda: None) -> list:
        taken = []

        def generate_batch(*args, **settings):
            for column in columns:
                before_each()
                taken.append(column)
                yield column

        monkeypatch.setattr(Spider, "generate_batch", generate_batch)
        return taken

    return have_written


def columns_of(text: bytes) -> list[list[int]]:
    return [[byte] for byte in text]


# --------------------------------------------------------------------------------------------------
# Sampling


def test_directory_means_its_newest_intact_checkpoint(trained, tmp_path, monkeypatch, capsys):
    """sample.py logs the checkpoint, and the backend that `auto` chooses."""

    def resolve_backend(name, device, *_, **__):
        return "loop", f"{name} on {device}"

    monkeypatch.setattr(load, "resolve_backend", resolve_backend)
    for step in (1, 2, 3):
        shutil.copy(trained / f"spider-step{step}.pt", tmp_path)
    os.truncate(tmp_path / "spider-step3.pt", 9000)
    second = tmp_path / "spider-step2.pt"
    err = run_sample(capsys, tmp_path, "--prompt", "", "--bytes", "1").err
    assert f"{second}, step 2: the newest checkpoint of {tmp_path}\n" in err
    assert "auto on cpu" in err


def test_run_that_saved_last_is_the_default(trained, tmp_path, monkeypatch, capsys):
    """A directory means itself if it is a run, else the newest run below it."""
    monkeypatch.chdir(tmp_path)
    changes = {"1": 4, "a/b/1": 9, "a/b/2": 3, "a/copies/2-best": 8, "c/1": 1, "c/3": 5}
    for name, changed in changes.items():
        folder, _, stem = f"checkpoints/{name}".rpartition("/")
        os.makedirs(folder, exist_ok=True)
        path = shutil.copy(trained / f"spider-step{stem[0]}.pt", f"{folder}/spider-step{stem}.pt")
        os.utime(path, (changed, changed))
    os.symlink("gone", "checkpoints/c/spider-step4.pt")

    def log(*argv) -> str:
        return run_sample(capsys, *argv, "--prompt", "", "--bytes", "1").err

    runs = "the newest run (of 3 in checkpoints)"
    newest = "the newest checkpoint of"
    assert f" checkpoints/c/spider-step3.pt, step 3: {newest} {runs}\n" in log()
    assert f"c/spider-step3.pt: the lowest validation loss of {runs}, " in log("--best")
    assert f"/spider-step1.pt, step 1: {newest} checkpoints\n" in log("checkpoints")
    below = f"checkpoints/a/b/spider-step2.pt, step 2: {newest} the newest run (of 1"
    assert f"{below} in checkpoints/a)\n" in log("checkpoints/a")


def test_control_characters_are_escaped_unless_raw(trained, writes, capsysbinary):
    text = "a\x1b]0;t\x07\r\b\x7f\x9b2J\u202e\u2028\x00 b\tc\nd é漢🕸".encode() + b"\xff\x9b\xf0\x9f"
    writes(columns_of(text))
    assert sample.main([str(trained), "--prompt", "\x1b[31mp", "--raw"]) == 0
    assert capsysbinary.readouterr().out == b"\x1b[31mp" + text + b"\n"
    assert sample.main([str(trained), "--prompt", "\x1b[31mp"]) == 0
    assert capsysbinary.readouterr().out.decode() == (
        "\\x1b[31mpa\\x1b]0;t\\x07\\r\\x08\\x7f\\x9b2J\\u202e\\u2028\\x00 b\tc\nd "
        "é漢🕸\ufffd\ufffd\ufffd\n"
    )


@pytest.mark.parametrize(
    "stop, seen",
    (
        ([], ["", "", *["é"] * 3, *["é漢"] * 4, "é漢🕸", "é漢🕸\n", "é漢🕸\n"]),
        # bytes that may begin a stop text are held back
        (["no", "stop"], [*[""] * 5, *["é"] * 3, *["é漢"] * 4]),
    ),
    ids=("no stop text", "stop texts"),
)
def test_text_is_streamed_in_whole_characters(
    trained, writes, capsysbinary, monkeypatch, stop, seen
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    found = []
    writes(
        columns_of("é漢🕸\n".encode() + b"\xc3x"),
        lambda: found.append(sys.stdout.buffer.getvalue().decode()),
    )
    assert sample.main([str(trained), "--prompt", "", *(f"--stop={text}" for text in stop)]) == 0
    assert found == seen
    assert capsysbinary.readouterr().out.decode() == "é漢🕸\n\ufffdx\n"


@pytest.mark.parametrize("stdout", ("terminal", "notebook", "pipe"))
def test_only_a_terminal_gets_bytes_more_than_ten_times_a_second(stdout, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(JPY_PARENT_PID="1") if stdout == "notebook" else {})
    file = io.TextIOWrapper(io.BytesIO(), write_through=True)  # as with PYTHONUNBUFFERED
    monkeypatch.setattr(file, "isatty", lambda: stdout != "pipe", raising=False)
    monkeypatch.setattr(sys, "stdout", file)
    clock = itertools.count(7.0, 0.04)
    monkeypatch.setattr(sampling, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    seen = []

    def pieces():
        for byte in b"abcdef":
            yield bytes([byte])
            seen.append(len(file.buffer.getvalue()))

    sampling.print_bytes(pieces(), raw=False)
    assert seen == ([1, 2, 3, 4, 5, 6] if stdout == "terminal" else [1, 1, 1, 4, 4, 4])
    assert file.buffer.getvalue() == b"abcdef\n"


def test_closed_pipe_ends_sampling_silently(trained):
    argv = [sys.executable, ROOT / "sample.py", trained, *"--bytes 100000 --prompt x".split()]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(1) == "x"
    process.stdout.close()
    (line,) = process.stderr.read().splitlines()
    assert "the newest checkpoint" in line
    assert process.wait(timeout=100) == 0


def test_standard_input_is_used_as_the_prompt(trained, tmp_path, capsysbinary):
    argv = [str(trained), *"--bytes 4 --raw --seed 3".split()]
    stdin = os.dup(0)
    try:
        for text in (b"abc\n", b"", b"a\xffb"):
            (tmp_path / "stdin").write_bytes(text)
            with open(tmp_path / "stdin", "rb") as file:
                os.dup2(file.fileno(), 0)
            status = sample.main(argv)
            written = capsysbinary.readouterr().out
            assert sample.main([*argv, "--prompt", os.fsdecode(text)]) == status == 0
            assert written == capsysbinary.readouterr().out
            assert written.startswith(text) and len(written) > len(text)
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_sampling_flags_take_effect_and_samples_are_printed_in_turn(trained, capsys):
    def samples(flags: str = "") -> list[str]:
        argv = "--prompt ab --bytes 30 --temperature 3 --samples 3 " + flags
        out = run_sample(capsys, trained, *argv.split()).out
        texts = re.split("--- . of 3\n", out)
        assert texts.pop(0) == "" and out.count("---") == 3
        assert all(text.startswith("ab") for text in texts)
        return texts

    texts = samples()
    assert len(set(texts)) == 3
    assert samples() == texts
    assert samples("--seed 1") != texts
    for greedy in ("--temperature 0", "--top_k 1", "--top_p 1e-9"):
        assert len(set(samples(greedy))) == 1, greedy
    assert samples("--top_k 1 --no_repeat_ngram_size 1") != samples("--top_k 1")


@pytest.mark.parametrize(
    "text, stops, expected",
    (
        ("abcd", ["abcd"], ""),
        ("xabc", ["c", "abc"], "x"),
        ("aabac", ["aba"], "a"),
        ("abab", ["abc", "babb"], "abab"),
    ),
    ids=repr,
)
def test_sample_ends_before_the_first_stop_text(trained, writes, capsys, text, stops, expected):
    writes(columns_of(text.encode()))
    flags = [f"--stop={stop}" for stop in stops]
    # a stop text in the prompt is ignored
    assert run_sample(capsys, trained, "--prompt", text, *flags).out == f"{text}{expected}\n"


def test_each_sample_ends_at_its_own_stop_text_or_eos(trained, writes, capsys):
    dot = ord(".")
    taken = writes([[97, dot, 97], [dot, 99, 98], [100, 100, None], [101, dot, None]])
    flags = "--prompt x --samples 3 --stop .".split()
    out = run_sample(capsys, trained, *flags).out
    assert out == "--- 1 of 3\nxa\n--- 2 of 3\nx\n--- 3 of 3\nxab\n"
    assert len(taken) == 3  # generation stops when all samples have ended
    assert run_sample(capsys, trained, *flags, "--no_echo").out == out.replace("x", "")


def test_log_names_a_checkpoint_better_than_the_newest(trained, tmp_path, capsys):
    def save(step: int, loss: float | None, best: float):
        saved = torch.load(trained / f"spider-step{step}.pt")
        torch.save(saved | dict(val_loss=loss, best_loss=best), tmp_path / f"spider-step{step}.pt")

    def lines(*flags) -> str:
        return run_sample(capsys, tmp_path, "--prompt", "", "--bytes", "1", *flags).err

    save(1, loss=1.25, best=1.25)
    save(3, loss=1.5, best=1.25)
    hint = "spider-step1.pt has the lowest validation loss, 1.8034 bits per byte: to use it, add"
    assert f"{hint} --best\n" in lines()
    assert f"spider-step1.pt: the lowest validation loss of {tmp_path}, 1.8034 bits" in lines(
        "--best"
    )
    save(3, loss=None, best=1.25)
    assert hint in lines()
    (tmp_path / "spider-step1.pt").unlink()
    assert "--best" not in lines()  # the best one was deleted


def test_ctrl_c_at_the_prompt_ends_a_dialogue(trained, monkeypatch, capsys):
    """Without --prompt, a terminal starts a dialogue."""
    lines = iter(["ab"])

    def type_line(prompt: str) -> str:
        for line in lines:
            return line
        raise KeyboardInterrupt

    monkeypatch.setattr(builtins, "input", type_line)
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert sample.main([str(trained / "spider-step3.pt"), "--bytes", "5"]) == 130
    out, err = capsys.readouterr()
    assert "spider-step3.pt, step 3. " in out and "Ctrl-D quits." in out
    assert err == ""


# --------------------------------------------------------------------------------------------------
# Evaluation


def test_evaluating_a_prepared_directory_gives_the_val_bpb_of_training(trained, figures):
    data = trained.parent / "data"
    val_bpb = metrics(trained)[-1]["val_bpb"]
    for flags, tolerance in (("", 1e-12), ("--batch 4", 1e-5)):
        (found,) = figures(trained, "--eval", data, *flags.split())
        assert found.pop("bits_per_byte") == pytest.approx(val_bpb, rel=tolerance)
        assert found.pop("bits_per_character") == pytest.approx(val_bpb, rel=tolerance)
        assert found.pop("precision") in ("bf16", "fp32")  # auto chooses
        assert found == dict(
            checkpoint=str(trained / "spider-step3.pt"),
            file=str(data),
            n_loops=2,
            bytes=299,
            characters=299,
            seq_len=32,
            adapt=False,
        )


def test_files_are_read_in_longer_windows_if_attention_of_bytes_has_a_window(tmp_path, figures):
    """They give the bits of one pass over a text that is longer than the sequences of training."""
    data = make_shards(tmp_path / "data")
    text = b"abcdef gh" * 5
    file = tmp_path / "a.txt"
    file.write_bytes(text)
    for byte_window, lengths in ((0, (32, 32)), (5, (32_768, 32))):
        sizes = f"--set {SMALL},byte_window={byte_window}"
        directory = run(tmp_path, data, sizes, steps=1, ckpt=f"window{byte_window}")
        found = figures(directory, "--eval", file, data, "--precision", "fp32")
        assert tuple(entry["seq_len"] for entry in found) == lengths
        (given,) = figures(directory, "--eval", file, "--seq_len", "33")
        assert given["seq_len"] == 33
    model = decoder_of(read_checkpoint(str(directory), Spider)[1], CPU, Spider)
    ids = torch.tensor([[BOS_ID, *text]])
    with torch.no_grad():
        nats = float(model(ids[:, :-1], ids[:, 1:], n_loops=2).nats_per_byte)
    assert found[0]["bits_per_byte"] == pytest.approx(nats / math.log(2), rel=1e-5)
    assert found[0]["bits_per_byte"] != pytest.approx(given["bits_per_byte"], rel=1e-5)


@pytest.mark.parametrize(
    "byte_window, trained, expected",
    [(0, 2048, 2048), (0, 65_536, 65_536), (64, 4096, 1 << 15), (64, 65_536, 65_536)],
)
def test_default_window_of_a_file_is_at_least_32768_or_the_length_in_training(
    byte_window, trained, expected
):
    config = SpiderConfig(byte_window=byte_window)
    assert sample.window_length(stream([]), trained, config) == expected


def test_files_are_scored_by_their_bytes_with_a_bos_per_document(trained, tmp_path, figures):
    """Each file format gives the bits that the model gives directly, for documents shorter and
    longer than a window."""
    texts = ("abc de\xe9", "f", "gh\0abcdef " * 5)  # the last one would be binary to `prepare`
    model = decoder_of(read_checkpoint(str(trained), Spider)[1], CPU, Spider)
    bits = 0.0
    for number, text in enumerate(texts):
        ids = torch.tensor([[BOS_ID, *text.encode()]])
        with torch.no_grad():
            nats = float(model(ids[:, :-1], ids[:, 1:], n_loops=2).nats_per_byte)
        bits += nats * (ids.shape[1] - 1) / math.log(2)
        (tmp_path / f"{number}.md").write_text(text)
    lines = "".join(json.dumps({"words": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_ids(tmp_path / "a.bin", *(text.encode() for text in texts))

    names = "a.jsonl b.jsonl.gz a.bin 0.md 1.md 2.md"
    paths = [tmp_path / name for name in names.split()]
    flags = "--field words --seq_len 99 --precision fp32".split()
    by_file = figures(trained, "--eval", *paths, *flags)
    counts = [found["bytes"] for found in by_file]
    sums = [found["bytes"] * found["bits_per_byte"] for found in by_file]
    n_bytes = len("".join(texts).encode())
    assert [*counts[:3], sum(counts[3:])] == [n_bytes] * 4
    assert [*sums[:3], sum(sums[3:])] == pytest.approx([bits] * 4, rel=1e-5)


def write_ids(path: Path, *documents: bytes):
    """Write a shard of documents."""
    write_shard(path, [i for document in documents for i in (BOS_ID, *document, EOS_ID)])


def test_eval_table_has_a_row_per_checkpoint_text_and_number_of_loops(
    trained, tmp_path, figures, capsys
):
    plain = trained.parent / "data"
    text = tmp_path / "a\x1b.txt"
    text.write_text("abc d\u00e9f")
    checkpoints = [trained / "spider-step1.pt", trained / "spider-step3.pt"]
    found = figures(*checkpoints, "--n_loops", "2,1", "--eval", text, plain)
    head, *lines = capsys.readouterr().out.splitlines()
    columns = "checkpoint file n_loops bytes bits/byte characters bits/character"
    assert head.split() == columns.split()
    keys = itertools.product(map(str, checkpoints), map(str, (text, plain)), (2, 1))
    for line, entry, key in zip(lines, found, keys, strict=True):
        assert (entry["checkpoint"], entry["file"], entry["n_loops"]) == key
        assert len(line) == len(head) and line.isprintable()
        assert line.split()[4:6] == [f"{entry['bits_per_byte']:.4f}", str(entry["characters"])]
    figures(trained, "--eval", plain)
    assert "characters" not in capsys.readouterr().out


def test_bits_per_character_count_each_invalid_byte_as_a_character(
    trained, tmp_path, figures, monkeypatch
):
    monkeypatch.setattr(adapt, "DECODE_CHUNK", 2)  # ids: a character lies in two pieces or three
    documents = ("aé漢🕸".encode(), b"\xff\xe6\xbc", "漢".encode()[:1], "漢字".encode())
    characters = 4 + 3 + 1 + 2
    data = tmp_path / "data"
    for name in ("train-0.bin", "val-0.bin"):
        write_ids(data / name, *documents)
    file, directory = figures(trained, "--eval", data / "val-0.bin", data)
    n_bytes = sum(map(len, documents))
    assert (file["bytes"], file["characters"]) == (n_bytes, characters)
    special = 2 * len(documents) - 1  # BOS and EOS are predicted, except the first BOS
    assert directory["bytes"] == n_bytes + special
    assert directory["characters"] == characters + special
    for found in (file, directory):
        bits = found["bits_per_byte"] * found["bytes"]
        assert found["bits_per_character"] * found["characters"] == pytest.approx(bits)


# --------------------------------------------------------------------------------------------------
# Errors


@pytest.fixture
def files(trained, tmp_path, monkeypatch) -> Path:
    """Return a working directory with a trained model and files of all kinds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(trained)
    (tmp_path / "a.txt").write_text("abc")
    (tmp_path / "text.pt").write_text("no checkpoint")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "no.jsonl").write_text('{"a": 1}\n')
    write_shard(tmp_path / "one.bin", [97])
    return tmp_path


@pytest.mark.parametrize(
    "argv, remedy",
    (
        # flags
        ("run --eval a.txt --html out", "--html cannot be used with --eval"),
        ("run --adapt", "--adapt needs --eval"),
        ("run --eval a.txt --samples 3", "--samples cannot be used with --eval"),
        ("run --export new --n_loops 2", "--n_loops cannot be used with --export"),
        ("run --eval a.txt --adapt --seq_len 64", "--batch cannot be used with --adapt"),
        ("run b --prompt a", "only --eval takes several checkpoints"),
        ("run --prompt a --n_loops 1,2", "several checkpoints or numbers of loops"),
        ("run --stop=", "--stop: an empty text would end every sample"),
        ("run --n_loops 4097", "--n_loops: '4097' is not a whole number that is at least 1"),
        # checkpoints
        (
            "",
            "checkpoints: no such directory, or no checkpoint in it: name another, or train first",
        ),
        ("text.pt", "text.pt is not a checkpoint"),
        (
            "a.txt",
            "a.txt is not a checkpoint but a text: to train on it, python train.py --text a.txt",
        ),
        ("empty", "no checkpoint in it: name another, or train first: python train.py --text FILE"),
        ("run/spider-step3.pt --best", "no such directory"),
        # texts, and files to write
        ("run --eval empty.txt", "empty.txt: empty"),
        ("run --eval no.jsonl", "no.jsonl:1: without a text in 'text': it has a: make one text"),
        ("run --eval empty", "empty: "),
        ("run --eval one.bin", "one.bin: no byte to predict"),
        ("run --show nofile.txt", "nofile.txt: no such file; to show a text that looks like"),
        ("run --show no/file", "no/file: no such file"),
        ("none --eval a.txt --json no/out", "no/out: No such file"),
        ("run --export empty.txt", "exists and is not an empty directory: use another name"),
    ),
)
def test_bad_command_is_refused_in_one_line_with_the_remedy(files, capsys, argv, remedy):
    before = sorted(files.rglob("*"))
    line = refused(argv.split(), capsys, program="sample.py", main=sample.main)
    assert remedy in line
    assert sorted(files.rglob("*")) == before


def test_every_command_refuses_ruined_weights(files, capsys):
    saved = final_state(files / "run")
    saved["model_state_dict"]["lm_head.weight"][0, 0] = math.nan
    torch.save(saved, "ruined.pt")
    for command in ("--prompt a", "--eval a.txt", "--eval a.txt --adapt", "--show abc"):
        assert sample.main(["ruined.pt", *command.split()]) == 2
        assert "its weights are ruined" in capsys.readouterr().err.splitlines()[-1]


def test_out_of_memory_is_reported_in_one_line_with_the_remedy(files, monkeypatch, capsys):
    def fail(*args, **settings):
        raise RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(Spider, "step", fail)
    monkeypatch.setattr(Spider, "forward", fail)
    for argv in ("run --prompt x --samples 65536", "run --eval a.txt"):
        line = refused(argv.split(), capsys, program="sample.py", main=sample.main)
        assert "lower --samples or --bytes (with --eval: --batch or --seq_len)" in line
