"""What a model shows of itself: that it is what the model computes, and that nothing shown is obeyed."""

import io
import json
import math
import os
import re
import signal
import sys
from bisect import bisect
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loguru import logger

import data
import sample
import train
from conftest import awake, final_state, make_shards, run, run_flags, small_config
from spider import errors
from spider.inspect import page, reading, terminal
from spider.inspect.page import SCRIPT, chart, text_view, ticks
from spider.model.decoding import PIECE
from spider.training import curves, stopping
from spider.training.curves import draw_curves
from tokenizer import BOS_ID

ODD = ("<script>alert(1)</script> \x1b]0;t\x07\x9b2J \u202e\u2028\x00\t\r\n é漢🕸 </title></style>\"'&amp;"
       .encode() + b"\xff\xf0\x9f \\n")


def model_of(**changes):
    model = awake(small_config(**changes), dtype=torch.float64).eval()
    if changes.get("n_recurrent_layers") != 0 and changes.get("act") is not False:
        model.core.halt_predictor.weight.data.normal_(std=1.0)           # so that segments take 1 to 3 loops
    model.set_backend("loop")                                            # grouped products take no float64
    return model


def text_of(length: int) -> bytes:
    return bytes(torch.randint(32, 127, (length,), generator=torch.Generator().manual_seed(0)).tolist())


def show(model, text: bytes, tmp_path, capsys, lines=()) -> tuple[str, str]:
    """What show prints and the page that it writes, with these lines in metrics.jsonl."""
    (tmp_path / "text").write_bytes(text)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    page.show(model, 3, str(tmp_path / "text"), tmp_path, None)
    return capsys.readouterr().out, (tmp_path / "look.html").read_text()


class Page(HTMLParser):
    """Elements of a page with their attributes, and its text by element."""

    def __init__(self, content: str):
        super().__init__()
        self.elements, self.within, self.inside = [], {}, []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_data(self, content):
        if self.inside:
            self.within[self.inside[-1]] = self.within.get(self.inside[-1], "") + content


@pytest.mark.parametrize("length", (1, 2 * PIECE + 50))
def test_what_is_shown_is_what_the_full_pass_computes(length):
    model, text = model_of(), text_of(length)
    ids = torch.tensor([[BOS_ID, *text]])
    shown = reading.read(model, text, 3)
    record = shown.record
    out = model(ids, torch.cat((ids[:, 1:], torch.tensor([[-100]])), dim=1), n_loops=3)
    assert shown.bits_per_byte * math.log(2) == pytest.approx(out.nats_per_byte.item(), rel=1e-9)
    assert len(record.loops) == sum(record.ends) == int(out.segments)
    assert shown.segment[-1] + shown.ends[-1] == len(record.loops) and len(shown.bits) == length
    assert sum(record.loops) == pytest.approx(float(out.mean_loops) * len(record.loops))
    for layer, tokens in enumerate(out.tokens_per_expert):
        loads = [load for (i, _), load in record.load.items() if i == layer]
        assert torch.equal(sum(loads, torch.zeros(4)), tokens.float())
    if length > PIECE:
        assert len(set(record.loops)) > 1                                # else this compares nothing
        for (_, loop), gates in record.gates.items():
            assert sorted(gates) == [segment for segment, loops in enumerate(record.loops) if loops > loop]
        assert len(record.byte_gates) == length + 1


def test_gates_shown_are_the_ones_that_the_model_multiplies_by(monkeypatch):
    model, text = model_of(), text_of(40)
    before = reading.read(model, text, 2)
    engram, gate = model.core.layers[1].engram, model.engram_output.gate
    monkeypatch.setattr(type(engram), "gate", lambda self, h, key: h.new_full((len(h), 1), 0.25))
    gate.weight.data.zero_()
    after = reading.read(model, text, 2)
    assert {value for gates in after.record.gates.values() for value in gates.values()} == {0.25}
    assert {value for gates in after.record.byte_gates for value in gates} == {0.5}
    assert all(0 < value < 1 and value != 0.25 for gates in before.record.gates.values() for value in gates.values())
    assert after.bits != before.bits


def test_a_model_that_was_looked_at_is_as_it_was_before(monkeypatch):
    model, text = model_of(), text_of(20)
    calls = []
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(model, "after_core", lambda *_: calls.append(1) or 1 / 0)
        try:
            reading.read(model, text, 2)
        except ZeroDivisionError:
            calls.append(2)
        assert "boundaries" not in vars(model)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert calls == [1, 2]


@pytest.mark.parametrize("changes", (
    {}, dict(n_recurrent_layers=0, engram_layers=()), dict(n_routed_experts=0), dict(act=False), dict(engram_layers=()),
    dict(engram_byte_orders=()), dict(boundaries="whitespace"), dict(boundaries="every_byte"), dict(n_coda_layers=0),
    dict(engram_match_words=(1, 2))),
    ids=str)
def test_whatever_a_model_is_made_of_it_shows_what_it_has(changes, tmp_path, capsys):
    printed, page = show(model_of(**changes), ODD * 4, tmp_path, capsys)
    has_core = changes.get("n_recurrent_layers") != 0
    assert ("segments end" in printed) == bool(re.search(r"segment \d+,", page)) == has_core
    assert ("Experts" in page) == (has_core and changes.get("n_routed_experts") != 0)
    assert ("layer 2, loop 1" in page) == (changes.get("engram_layers") is None)
    assert ("last 1 byte<" in page) == (changes.get("engram_byte_orders") is None)
    assert "last 24, in the text<" in page
    assert ("word 2, in the text<" in page) == ("engram_match_words" in changes)
    assert "bits per byte" in printed and "Curves" not in page


def test_nothing_that_is_shown_reaches_a_terminal_as_a_command(tmp_path, monkeypatch, capsys):
    model = model_of()
    plain, _ = show(model, ODD, tmp_path, capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured, _ = show(model, ODD, tmp_path, capsys)
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert show(model, ODD, tmp_path, capsys)[0] == plain
    assert coloured.count("\x1b") > 20
    for printed in (plain, re.sub(r"\x1b\[0[0-9;]*m", "", coloured)):
        assert all(c.isprintable() or c == "\n" for c in printed)
        kept = re.sub("[│⁰¹²³⁴-⁹]", "", printed)
        assert kept.startswith("<script>alert(1)</script> \\x1b]0;t\\x07\\x9b2J \\u202e\\u2028\\x00\\t\\r↵\n é漢🕸 </ti")
        assert "&amp;\\xff\\xf0\\x9f \\n" in kept


def test_a_character_of_several_bytes_is_one_with_all_of_their_bits(capsys):
    text = "a漢\xe9".encode() + b"\xe6\xbc!"
    found = list(reading.characters(text))
    assert found == [("a", 0, 1), ("漢", 1, 4), ("é", 4, 6), ("\\xe6", 6, 7), ("\\xbc", 7, 8), ("!", 8, 9)]
    shown = reading.read(model_of(boundaries="every_byte"), text, 3)
    plain = "".join(terminal.in_terminal(shown, False)).split("\n")[0]
    assert re.sub("[│¹²³]", "|", plain) == "a|漢|é|\\xe6|\\xbc|!|"           # never within one
    shown.bits[1:4] = 1.5, 1.25, 4.0
    assert f'<b class=s{bisect(reading.BITS, 6.75)} title="漢' in "".join(text_view(shown))


def test_a_page_holds_what_it_shows_as_text_and_loads_nothing(tmp_path, capsys):
    home = tmp_path / "<img src=x onerror=alert(2)>&\x1b"
    home.mkdir()
    lines = [json.dumps(dict(step=step, loss=5 / step, val_bpb=1.0, lr="<b>alert(3)")) for step in (1, 2, 3)]
    _, page = show(model_of(), ODD, home, capsys, lines)
    found = Page(page)
    tags, names = [tag for tag, _ in found.elements], {name for _, attrs in found.elements for name in attrs}
    assert tags.count("script") == tags.count("style") == tags.count("title") == 1 and "img" not in tags
    assert found.within["script"].strip() == SCRIPT.strip()
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]
    assert "alert(3)" not in page and "://" not in page
    assert all(c.isprintable() or c == "\n" for c in page)
    kept = "".join(c for c in re.findall(r"<b [^>]*>([^<]*)</b>", page))
    assert kept.startswith("&lt;script&gt;alert(1)&lt;/script&gt; \\x1b]0;t")
    assert "&amp;amp;\\xff" in kept and "漢🕸" in kept
    assert "<img src=x onerror=alert(2)>&\\x1b reads" in found.within["title"]
    [policy] = [attrs["content"] for tag, attrs in found.elements if attrs.get("http-equiv")]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert page.count("<figure>") == 2 and "prefers-color-scheme: dark" in page


def test_lines_of_metrics_that_are_cut_off_or_altered_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert curves.read_metrics(path) == curves.read_metrics(tmp_path) == []
    good = [dict(step=step, bytes_seen=100 * step, loss=10.0 / step) for step in range(1, 1001)]
    bad = ("", "[1]", "7", '{"loss": 1}', '{"step": "<b>"}', '{"step": 1', "\xff\x00", "[" * 100_000, "1" * 5000)
    odd = '{"step": 1001, "bytes_seen": 100100, "loss": %s}'
    no_loss = (odd % value for value in ("1e999", "NaN", "null", "true", "9" * 400))
    path.write_text("\n".join([*map(json.dumps, good), *bad, *no_loss]))
    lines = curves.read_metrics(path)
    assert lines[:1000] == good and all(line == dict(step=1001, bytes_seen=100100) for line in lines[1000:])
    axis = curves.axis_of([lines])
    points = curves.curve(lines, axis, "loss", 2)
    assert axis[0] == "bytes_seen" and 200 < len(points) <= curves.POINTS
    assert points[0] == (pytest.approx(400e-6), pytest.approx(2 * (10 + 5 + 10 / 3 + 2.5) / 4))
    assert curves.axis_of([lines, [dict(step=1)]])[0] == "step"
    for values in ([1.0], [3.0] * 50, [0.0, 0.0], [-1e30, 1e30], [5.0, *[1.0] * 99]):
        low, high = curves.span(values)
        assert low < min(values) and high > sorted(values)[len(values) // 2] and len(ticks(low, high)) < 12
        lines = [dict(step=step, lr=value) for step, value in enumerate(values)]
        assert "nan" not in chart(lines, ("step", 1, "steps"), "rate", "lr", 1, "", 1)


def test_a_text_is_a_file_or_standard_input_or_stands_for_itself_and_is_cut_between_characters(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes(b"from a file")
    assert reading.take_text(str(path)) == (b"from a file", str(path))
    assert reading.take_text("no file, \udcff") == (b"no file, \xff", "a text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * (reading.LONGEST + 1))))
    assert reading.take_text("-") == (b"x" * reading.LONGEST, f"the first {reading.LONGEST:,} bytes of standard input")
    path.write_bytes(b"x" * reading.LONGEST)
    assert reading.take_text(str(path)) == (b"x" * reading.LONGEST, str(path))
    for before in range(1, 5):
        path.write_bytes(b"x" * (reading.LONGEST - before) + "🕸🕸".encode())
        text = reading.take_text(str(path))[0]
        assert text.decode().endswith("x🕸" if before == 4 else "xx") and len(text) == reading.LONGEST - before % 4
    path.write_bytes(b"\x80" * 5000)
    assert len(reading.take_text(str(path))[0]) >= reading.LONGEST - 3
    for empty in ("", str(tmp_path / "nothing")):
        (tmp_path / "nothing").write_bytes(b"")
        with pytest.raises(data.DataError, match="empty"):
            reading.take_text(empty)


def test_a_text_that_is_cut_is_said_to_be():
    said = []
    sink = logger.add(said.append, format="{message}")
    try:
        reading.take_text("x" * reading.LONGEST)
        assert not said
        reading.take_text("x" * (reading.LONGEST + 1))
    finally:
        logger.remove(sink)
    assert len(said) == 1 and f"the first {reading.LONGEST:,} bytes of a text" in said[0]


def test_sample_shows_a_text_and_writes_the_page_where_it_is_asked_to(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    directory = run(tmp_path, make_shards(tmp_path / "data"), steps=3)
    capsys.readouterr()

    def refused(*argv):
        assert sample.main([str(directory), *argv]) == 2
        out, err = capsys.readouterr()
        assert err.startswith("sample.py: error: ") and err.count("\n") == 1
        return err
    assert sample.main([str(directory), "--show", "abc def", "--n_loops", "1"]) == 0
    out, err = capsys.readouterr()
    assert "7 bytes, " in out and "loops: 1 (" in out and str(directory / "look.html") in out and not err
    assert "bits per byte<small>" in (directory / "look.html").read_text()
    assert sample.main([str(directory / "spider-step3.pt"), "--show", "abc", "--html", "out.html"]) == 0
    assert "bits per byte<small>" in Path("out.html").read_text()            # the checkpoint's directory has metrics
    (tmp_path / "shut").write_text("a file")
    assert "goes with --show" in refused("--html", "x.html")
    assert "/dev/null is no regular file" in refused("--show", "a", "--html", "/dev/null")
    assert "--html names another place" in refused("--show", "a", "--html", "gone/x.html")
    assert "is empty" in refused("--show", "")
    assert "directory" in refused("--show", str(tmp_path))
    state = final_state(directory)
    state["model_state_dict"]["lm_head.weight"][0, 0] = math.nan
    torch.save(state, directory / "spider-step9.pt")
    assert sample.main([str(directory / "spider-step9.pt"), "--show", "abc"]) == 2
    assert "its weights are ruined" in capsys.readouterr().err


def test_a_run_leaves_its_curves_however_it_ends_and_never_fails_for_them(tmp_path, monkeypatch, capsys):
    shards = make_shards(tmp_path / "data")
    picture = run(tmp_path, shards, steps=2) / "curves.png"
    assert not picture.exists()                                          # conftest's
    monkeypatch.setattr(curves, "draw_curves", draw_curves)

    def left(directory, status=0, steps=3) -> str:
        assert train.command_line(run_flags(shards, tmp_path / directory, steps=steps)) == status
        return capsys.readouterr().err
    with monkeypatch.context() as patch:                                 # as if it were not installed
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        assert "curves.png" not in left("without") and not (tmp_path / "without" / "curves.png").exists()
    pytest.importorskip("matplotlib")
    assert "curves.png" not in left("run") and picture.read_bytes().startswith(b"\x89PNG")
    before = picture.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        def diverges(*_):
            raise errors.Diverged("as told")
        patch.setattr(stopping.Stopping, "report", diverges)
        assert "as told" in left("run", status=1, steps=4) and picture.stat().st_mtime_ns > before
    picture.unlink()
    curves.leave_curves(picture.parent, SimpleNamespace(asked=signal.SIGTERM))
    assert not picture.exists()
    picture.mkdir()
    assert "curves.png is not drawn" in left("run", steps=5)


def test_curves_of_several_runs_are_one_picture_and_what_is_missing_is_named(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    for name in "ab":
        (tmp_path / name).mkdir()
        lines = '{"step": 1, "loss": 2}\n{"step": 2, "loss": 1, "val_loss": 1}\n'
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    out = tmp_path / "out.png"

    def refused(*argv):
        assert curves.main([str(out), *argv]) == 2 and not out.exists()
        return capsys.readouterr().err
    assert "LABEL=DIR" in refused() and "LABEL=DIR" in refused("a") and "LABEL=DIR" in refused("=x")
    assert "one: there are no lines" in refused(f"two={tmp_path / 'a'}", f"one={tmp_path}")
    assert curves.main([str(out), f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")


def test_labels_are_drawn_as_they_are_and_none_is_left_out(tmp_path, monkeypatch, capsys, recwarn):
    figure = pytest.importorskip("matplotlib.figure")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    drawn = {}

    def save(self, *args, real=figure.Figure.savefig, **kwargs):
        drawn["texts"] = [text.get_text() for text in self.axes[0].get_legend().get_texts()]
        real(self, *args, **kwargs)
    monkeypatch.setattr(figure.Figure, "savefig", save)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2, "val_loss": 1}\n{"step": 2, "loss": 1}\n')
    labels = ["$\\frac$", "$$", "$x^{$", "$x$", "_hidden", "_", "%s {}", "\\", "a\nb\x1b[2J", "\udcff\u202e", "漢🕸", " "]
    assert curves.main([str(tmp_path / "o.png"), *(f"{label}={tmp_path}" for label in labels)]) == 0
    assert drawn["texts"][:1] + drawn["texts"][2:] == [*labels[:8], "a\\nb\\x1b[2J", "\\udcff\\u202e", "漢🕸", " "]
    assert drawn["texts"][1] == "validation" and capsys.readouterr().err == "" and not recwarn.list


@pytest.mark.parametrize("out", ("", ".", "/", "folder", "pipe", "x" * 300, "gone/x.png"))
def test_a_picture_that_could_go_nowhere_is_one_line(tmp_path, monkeypatch, capsys, out):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n')
    assert curves.main([out, f"a={tmp_path}"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("look.py: error: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "metrics.jsonl", "pipe"]
    assert (tmp_path / "pipe").is_fifo()
