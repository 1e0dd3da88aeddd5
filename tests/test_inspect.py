"""--show records what the model computes; nothing in a terminal or a page is obeyed; curves of
runs."""

import html
import io
import json
import math
import re
import shutil
import signal
import subprocess
import sys
from bisect import bisect
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import sample
import train
from conftest import awake, make_shards, run, run_flags, small_config
from spider import curves, inspect
from spider.common import DataError
from spider.curves import draw_curves
from spider_model import Spider
from tokenizer import BOS_ID

ODD = (
    "<script>alert(1)</script> \x1b]0;t\x07\x9b2J \u202e\u2028\x00\t\r\n é漢🕸 "
    "</title></style>\"'&amp;".encode()
    + b"\xff\xf0\x9f \\n"
)


def model_of(**changes):
    model = awake(small_config(**changes), dtype=torch.float64).eval()
    if changes.get("n_recurrent_layers") != 0 and changes.get("act") is not False:
        model.core.halt_predictor.weight.data.normal_(std=1.0)  # so that segments take 1 to 3 loops
    return model


def text_of(length: int) -> bytes:
    return bytes(
        torch.randint(32, 127, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    )


def show(model, text: bytes, tmp_path, capsys) -> tuple[str, str]:
    """Return what show prints and the page that it writes."""
    (tmp_path / "text").write_bytes(text)
    inspect.show(model, 3, str(tmp_path / "text"), tmp_path, dict(step=3), None)
    return capsys.readouterr().out, (tmp_path / "look.html").read_text()


def data_of(content: str) -> dict:
    """Return the data that a page draws."""
    return json.loads(
        re.search('<script type="application/json" id="data">(.*?)</script>', content)[1]
    )


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


# --------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("length", (1, 560))
def test_what_is_shown_is_what_the_full_pass_computes(length):
    model, text = model_of(), text_of(length)
    ids = torch.tensor([[BOS_ID, *text]])
    shown = inspect.read(model, text, 3)
    record = shown.record
    out = model(ids, torch.cat((ids[:, 1:], torch.tensor([[-100]])), dim=1), n_loops=3)
    assert sum(shown.bits) / length * math.log(2) == pytest.approx(
        out.nats_per_byte.item(), rel=1e-9
    )
    assert len(record.loops) == sum(record.ends) == int(out.segments)
    assert shown.segment[-1] + shown.ends[-1] == len(record.loops) and len(shown.bits) == length
    assert sum(record.loops) == pytest.approx(float(out.mean_loops) * len(record.loops))
    for layer, tokens in enumerate(out.tokens_per_expert):
        loads = [load for (i, _), load in record.load.items() if i == layer]
        assert torch.equal(sum(loads, torch.zeros(4)), tokens.float())
    if length > 1:
        assert len(set(record.loops)) > 1  # else this compares nothing
        for (_, loop), gates in record.gates.items():
            assert sorted(gates) == [
                segment for segment, loops in enumerate(record.loops) if loops > loop
            ]
        assert sum(map(len, record.byte_gates)) == length + 1


@pytest.mark.parametrize("changes", ({}, dict(n_recurrent_layers=0, engram_layers=())), ids=str)
def test_a_long_text_is_read_in_windows_each_up_to_the_last_end_of_a_segment(monkeypatch, changes):
    monkeypatch.setattr(inspect, "WINDOW", 64)
    model, text, windows = model_of(**changes), text_of(300), []
    with model.register_forward_pre_hook(lambda _, args: windows.append(args[0])):
        shown = inspect.read(model, text, 3)
    ids, record, bits = [BOS_ID, *text], shown.record, []
    starts = [
        next(i for i in range(301) if ids[i : i + 64] == window[0].tolist()) for window in windows
    ]
    begins = [0, *(start + 32 for start in starts[1:])]  # after half a window of context
    stops = [*begins[1:], 301]
    assert len(windows) > 5 and starts[0] == 0 and all(start > 0 for start in starts[1:])
    for window, start, begin, stop in zip(windows, starts, begins, stops, strict=True):
        assert begin < stop <= start + 64
        assert stop == 301 or (stop == start + 64 if changes else record.ends[stop - 1])
        log_p = model(window, n_loops=3).logits[0].detach().log_softmax(-1)
        bits += [
            -float(log_p[n - start, ids[n + 1]]) / math.log(2) for n in range(begin, min(stop, 300))
        ]
    assert shown.bits == pytest.approx(bits, rel=1e-9)
    assert len(record.loops) == sum(record.ends) and shown.segment[-1] + shown.ends[-1] == len(
        record.loops
    )
    if not changes:
        assert min(record.loops) == 1 and max(record.loops) == 3
        for (_, loop), gates in record.gates.items():
            assert sorted(gates) == [
                segment for segment, loops in enumerate(record.loops) if loops > loop
            ]
        # layers, experts a token
        assert sum(load.sum() for load in record.load.values()) == sum(record.loops) * 2 * 2
        assert sum(map(len, record.byte_gates)) == 301


def every_byte_ends_a_segment(monkeypatch):
    monkeypatch.setattr(
        Spider, "boundaries", lambda self, predicted, ids, *_: torch.ones(ids.numel()).double()
    )


def test_segments_and_loops_are_counted_over_the_segments_that_end_in_the_text(monkeypatch):
    every_byte_ends_a_segment(monkeypatch)  # also that of BOS
    _, segments, loops = inspect.facts(inspect.read(model_of(), text_of(40), 2))
    assert (
        segments.startswith("40 segments")
        and sum(map(int, re.findall(r"\((\d+) segments\)", loops))) == 40
    )


def test_gates_shown_are_the_ones_that_the_model_multiplies_by(monkeypatch):
    model, text = model_of(), text_of(40)
    before = inspect.read(model, text, 2)
    engram, gate = model.core.layers[1].engram, model.engram_output.gate
    monkeypatch.setattr(type(engram), "gate", lambda self, h, key: h.new_full((len(h), 1), 0.25))
    gate.weight.data.zero_()
    after = inspect.read(model, text, 2)
    assert {value for gates in after.record.gates.values() for value in gates.values()} == {0.25}
    assert set(torch.cat(after.record.byte_gates).flatten().tolist()) == {0.5}
    assert all(
        0 < value < 1 and value != 0.25
        for gates in before.record.gates.values()
        for value in gates.values()
    )
    assert after.bits != before.bits


def test_halted_segments_are_told_apart_where_they_stay_in_the_products_as_on_a_gpu():
    model = model_of()
    loops = inspect.read(model, text_of(200), 3).record.loops
    assert set(loops) > {1}
    model.core.drop_halted = False
    assert (
        inspect.read(model, text_of(200), 3).record.loops == loops
        and model.core.drop_halted is False
    )


def test_a_model_is_unchanged_by_inspection(monkeypatch):
    model = model_of()
    inspect.read(model, b"abc", 2)
    monkeypatch.setattr(model, "after_core", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inspect.read(model, b"abc", 2)
    assert "boundaries" not in vars(model) and model.core.drop_halted is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_text_is_a_file_or_standard_input_or_stands_for_itself(tmp_path, monkeypatch):
    path, longest = tmp_path / "text", inspect.LONGEST
    path.write_bytes(b"from a file")
    assert inspect.take_text(str(path)) == (b"from a file", "text")
    assert inspect.take_text("no file, \udcff") == (b"no file, \xff", "a text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * (longest + 1))))
    assert inspect.take_text("-") == (
        b"x" * longest,
        f"the first {longest:,} bytes of standard input",
    )
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        inspect.take_text(str(path))


# --------------------------------------------------------------------------------------------------
# In a terminal and as a page


def test_nothing_that_is_shown_reaches_a_terminal_as_a_command(tmp_path, monkeypatch, capsys):
    model = model_of()
    plain, _ = show(model, ODD, tmp_path, capsys)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured, _ = show(model, ODD, tmp_path, capsys)
    monkeypatch.setenv("NO_COLOR", "1")
    assert show(model, ODD, tmp_path, capsys)[0] == plain and coloured.count("\x1b") > 20
    for printed in (plain, re.sub(r"\x1b\[0[0-9;]*m", "", coloured)):
        assert all(c.isprintable() or c == "\n" for c in printed)
        kept = re.sub("[│⁰¹²³⁴-⁹]", "", printed)
        start = (
            "<script>alert(1)</script> \\x1b]0;t\\x07\\x9b2J \\u202e\\u2028\\x00\\t\\r↵\n é漢🕸 </ti"
        )
        assert kept.startswith(start) and "&amp;\\xff\\xf0\\x9f \\n" in kept


def test_a_terminal_shows_the_beginning_of_a_long_text(monkeypatch):
    monkeypatch.setattr(inspect, "PRINTED", 12)
    shown = inspect.read(model_of(boundaries="words"), "Größe 漢字 and more".encode(), 2)
    printed = "".join(inspect.in_terminal(shown, False))
    assert printed.replace("│", "").startswith("Größe 漢字 ... (all 23 bytes are on the page)\n\n")
    assert "23 bytes, " in printed


def test_a_character_of_several_bytes_is_one_with_all_of_their_bits(monkeypatch):
    every_byte_ends_a_segment(monkeypatch)
    text = "a漢\xe9".encode() + b"\xe6\xbc!"
    found = list(inspect.characters(text))
    assert found == [
        ("a", 0, 1),
        ("漢", 1, 4),
        ("é", 4, 6),
        ("\\xe6", 6, 7),
        ("\\xbc", 7, 8),
        ("!", 8, 9),
    ]
    model = model_of()
    shown = inspect.read(model, text, 3)
    plain = "".join(inspect.in_terminal(shown, False)).split("\n")[0]
    assert re.sub("[│¹²³]", "|", plain) == "a|漢|é|\\xe6|\\xbc|!|"  # never within one
    drawn = inspect.page_data(shown, model, [])
    assert drawn["glyphs"] == [glyph for glyph, _, _ in found] and drawn["lengths"] == "132111"
    assert drawn["bits"] == pytest.approx(shown.bits, abs=0.006)
    ids = torch.tensor([[BOS_ID, *text]])
    share, likeliest = model(ids, n_loops=3).logits[0, :-1].softmax(-1).topk(3)
    assert drawn["likeliest"] == likeliest.flatten().tolist() and drawn["names"][10] == "\\n"
    assert drawn["percent"] == pytest.approx((100 * share).flatten().tolist(), abs=0.51)


def test_a_segment_that_ends_within_the_last_character_has_its_number_of_loops_behind_that(
    monkeypatch,
):
    monkeypatch.setattr(
        Spider,
        "boundaries",
        lambda self, predicted, ids, *_: (torch.arange(ids.numel()) < ids.numel() - 2).double(),
    )  # after the first of three bytes
    shown = inspect.read(model_of(), text_of(60) + "漢".encode(), 3)
    loops = shown.record.loops
    assert len(set(loops)) > 1 and shown.segment[-1] == len(loops)
    printed = "".join(inspect.in_terminal(shown, False)).split("\n")[0]
    assert printed.endswith("漢" + "⁰¹²³"[loops[-1]])


@pytest.mark.parametrize(
    "changes",
    (
        {},
        dict(n_recurrent_layers=0, engram_layers=()),
        dict(n_routed_experts=0),
        dict(act=False),
        dict(engram_layers=()),
        dict(engram_byte_orders=()),
        dict(boundaries="words"),
        dict(n_coda_layers=0),
        dict(engram_match_words=(1, 2)),
    ),
    ids=str,
)
def test_a_page_shows_whatever_the_model_has(changes, tmp_path, capsys):
    printed, content = show(model_of(**changes), ODD * 4, tmp_path, capsys)
    shown = data_of(content)
    gates = {row["name"]: row["levels"] for row in shown["gates"]}
    has_core = changes.get("n_recurrent_layers") != 0
    assert ("segments, " in printed) == bool(shown["loops"]) == has_core
    assert bool(shown["load"]) == (has_core and changes.get("n_routed_experts") != 0)
    assert ("layer 2, loop 1" in gates) == (changes.get("engram_layers") is None)
    assert ("last 1 byte" in gates) == (changes.get("engram_byte_orders") is None)
    assert "last 24, in the text" in gates and "last n, in the text" in dict(shown["meanings"])
    words = changes.get("engram_match_words", ())
    assert (
        ("word 2, in the text" in gates)
        == ("word n, in the text" in dict(shown["meanings"]))
        == bool(words)
    )
    assert {len(levels) for levels in gates.values()} == {len(ODD) * 4} == {len(shown["ends"])}
    assert shown["bytes"] == (ODD * 4).hex()


@pytest.mark.parametrize("tables", ((), (1, 2)), ids=str)
def test_votes_are_shown_in_nats_where_they_are_cast_and_gates_of_matches_where_these_have_rows(
    tables, tmp_path, capsys
):
    model = model_of(engram_votes=2, engram_match_words=(1,), engram_byte_orders=tables)
    shown = data_of(show(model, b"abcd abcd abce", tmp_path, capsys)[1])
    rows = {row["name"]: row for row in shown["gates"]}
    votes = rows["last 3, its vote"]["levels"]
    assert [level != " " for level in votes] == [False] * 7 + [True] * 6 + [False]
    assert "0" in votes and "word 1, its vote" in rows  # below 0, as no gate is
    assert {name for name, row in rows.items() if row["shades"] == "votes"} == {
        name for name in rows if "vote" in name
    }
    assert ("last 3, in the text" in rows) == (tables == ())
    assert (
        inspect.levels_of(torch.tensor([-0.1, 0.0, 0.25, math.nan, 9.0]), inspect.VOTES) == "012 7"
    )


def test_a_page_holds_what_it_shows_as_text_and_loads_nothing(tmp_path, capsys):
    home = tmp_path / "<img src=x onerror=alert(2)>&\x1b"
    home.mkdir()
    _, content = show(model_of(), ODD + b"{{policy}} {{data}}", home, capsys)
    found, data, template = Page(content), data_of(content), inspect.TEMPLATE.read_text()
    tags, names = (
        [tag for tag, _ in found.elements],
        {name for _, attrs in found.elements for name in attrs},
    )
    assert (
        tags == [tag for tag, _ in Page(template).elements]
        and tags.count("script") == 2
        and "img" not in tags
    )
    assert not [name for name in names if name.startswith("on") or name in ("src", "href", "style")]
    assert "://" not in content
    assert all(c.isprintable() or c == "\n" for c in content)
    block = re.search('id="data">(.*?)</script>', content)[1]
    assert block.isascii() and not re.search("[<>&]", block)
    kept = "".join(data["glyphs"])
    assert kept.startswith("<script>alert(1)</script> \\x1b]0;t") and kept.endswith(
        "{{policy}} {{data}}"
    )
    assert found.within["title"] == "<img src=x onerror=alert(2)>&\\x1b reads text"
    assert str(tmp_path) not in content  # paths are private
    [policy] = [attrs["content"] for tag, attrs in found.elements if attrs.get("http-equiv")]
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    assert policy.startswith(
        f"default-src 'none'; script-src '{inspect.hash_of(script)}'; style-src 'sha256-"
    )
    assert script in content
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval|Function", script)


def test_the_page_names_a_checkpoint_that_is_the_working_directory(tmp_path, monkeypatch, capsys):
    (tmp_path / "exported").mkdir()
    monkeypatch.chdir(tmp_path / "exported")  # as an export may be
    inspect.show(model_of(), 1, "abc", Path("."), dict(step=3), None)
    assert Page(Path("look.html").read_text()).within["title"] == "exported reads a text"


def dom_of(page: Path) -> str:
    """Open a page in a browser; return its elements as HTML. Nothing may be logged to the
    console."""
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=3000",
        "--enable-logging=stderr",
        "--dump-dom",
    )
    done = subprocess.run(
        ["chromium", *flags, page.as_uri()], text=True, capture_output=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_a_browser_draws_the_page_and_runs_nothing_that_a_text_holds(tmp_path, capsys):
    text = b"a<img src=x onerror=document.title='pwned'>" + ODD
    _, content = show(model_of(), text, tmp_path, capsys)
    drawn, data = Page(dom_of(tmp_path / "look.html")), data_of(content)
    classes = [attrs.get("class") for _, attrs in drawn.elements]
    assert "pwned" not in drawn.within["title"] and "img" not in [tag for tag, _ in drawn.elements]
    assert drawn.within["b"].replace("\n", "").replace("↵", "\\n") == "".join(data["glyphs"])
    bits, levels = iter(data["bits"]), set()
    for length in data["lengths"]:
        levels.add(f"s{bisect(inspect.BITS, sum(next(bits) for _ in range(int(length))))}")
    assert levels == {attrs["class"] for tag, attrs in drawn.elements if tag == "b"}
    assert classes.count("tape") == -(-len(text) // 64)
    assert [tag for tag, _ in drawn.elements].count("tr") == 1 + len(data["load"])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
@pytest.mark.parametrize(
    "asked",
    (
        "new PointerEvent('pointerover', { bubbles: true })",
        "new KeyboardEvent('keydown', { key: 'ArrowRight' })",
    ),
)
def test_a_browser_shows_the_likeliest_bytes_beside_a_character_and_a_long_text_whole(
    tmp_path, capsys, monkeypatch, asked
):
    template = inspect.TEMPLATE.read_text()
    target = "document.querySelector('[data-i=\"0\"]')" if "Pointer" in asked else "by('text')"
    template = template.replace(
        "</script></body>", f"{target}.dispatchEvent({asked});</script></body>"
    )
    (tmp_path / "page.html").write_text(template)
    monkeypatch.setattr(inspect, "TEMPLATE", tmp_path / "page.html")
    text = "é".encode() + text_of(5000)
    _, content = show(model_of(n_recurrent_layers=0, engram_layers=()), text, tmp_path, capsys)
    dom, data = dom_of(tmp_path / "look.html"), data_of(content)
    assert re.findall("<td>([0-9]+%)</td>", dom) == [
        f"{percent}%" for percent in data["percent"][:6]
    ]
    drawn = Page(dom)
    (about,) = [attrs for tag, attrs in drawn.elements if tag == "output"]
    assert "left:" in about["style"] and "hidden" not in about
    # the rest is plain text until it is near
    assert 1024 <= [tag for tag, _ in drawn.elements].count("b") < 5001
    shown = re.search('id="text".*?>(.*?)</section>', dom, re.DOTALL)[1]
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == text.decode()


def test_sample_shows_a_text_and_writes_the_page_where_it_is_asked_to(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    directory = run(tmp_path, make_shards(tmp_path / "data"), steps=3)
    assert sample.main([str(directory), "--show", "abc def", "--n_loops", "1"]) == 0
    out = capsys.readouterr().out
    assert "7 bytes, " in out and "loops: 1 (" in out and str(directory / "look.html") in out
    data = data_of((directory / "look.html").read_text())
    assert bytes.fromhex(data["bytes"]) == b"abc def"
    val_bpb = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])["val_bpb"]
    assert data["run"][1:] == [
        "step 3",
        "trained on 192 bytes",
        "data: data",
        f"validation at step 3: {val_bpb:.3f} bits per byte",
    ]
    assert data["run"][0].startswith("tiny, ")
    assert (
        sample.main([str(directory / "spider-step3.pt"), "--show", "abc", "--html", "out.html"])
        == 0
    )
    assert bytes.fromhex(data_of(Path("out.html").read_text())["bytes"]) == b"abc"
    for argv in (
        ["a", "--html", "/dev/null"],
        ["a", "--html", "gone/x.html"],
        [""],
        [str(tmp_path)],
    ):
        assert sample.main([str(directory), "--show", *argv]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("sample.py: error: ")


# --------------------------------------------------------------------------------------------------
# Curves


def test_lines_of_metrics_that_are_truncated_or_altered_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert curves.read_metrics(path) == curves.read_metrics(tmp_path) == []
    good = [dict(step=step, bytes_seen=100 * step, loss=10.0 / step) for step in range(1, 1001)]
    odd = '{"step": 1001, "bytes_seen": 100100, "loss": %s}'
    bad = "[1]", '{"step": 1', "\xff\x00", odd % "NaN", odd % ("9" * 400)
    path.write_text("\n".join([*map(json.dumps, good), *bad]))
    lines = curves.read_metrics(path)
    assert lines[:1000] == good and all(
        line == dict(step=1001, bytes_seen=100100) for line in lines[1000:]
    )
    points = curves.curve(lines, "loss", 2)
    assert 200 < len(points) <= curves.POINTS
    assert points[0] == (pytest.approx(400e-6), pytest.approx(2 * (10 + 5 + 10 / 3 + 2.5) / 4))


def test_limits_leave_out_the_first_values_and_smoothing_does_not_shift_a_curve():
    for values in ([1.0], [3.0] * 50, [0.0, 0.0], [-1e30, 1e30], [5.0, *[1.0] * 99]):
        low, high = curves.span([list(enumerate(values))])
        assert low < min(values) and sorted(values)[len(values) // 2] < high
    assert high < 2
    points = [(n, 5.0 - 0.01 * n + (-1) ** n) for n in range(300)]
    found = curves.smoothed(points)
    assert [x for x, _ in found] == [x for x, _ in points] and found[0] == points[0]
    assert all(abs(y - (5.0 - 0.01 * x)) < 0.2 for x, y in found[8:])


def lines_of(steps: int, **values) -> list[dict]:
    """Lines of metrics.jsonl: a loss of 1.25 bits, an evaluation at each even step, and these
    values."""
    lines = [
        dict(step=step, bytes_seen=100_000 * step, epoch=step // 4, loss=1.25 * math.log(2))
        | values
        for step in range(1, steps + 1)
    ]
    for line in lines[1::2]:
        line["val_bpb"] = 2 + abs(line["step"] - 6) / 10
    return lines


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw runs; return the figure, which is not rendered."""
    figure = pytest.importorskip("matplotlib.figure").Figure

    def draw(**runs):
        found = []
        with monkeypatch.context() as patch:
            patch.setattr(figure, "savefig", lambda figure, *_, **settings: found.append(figure))
            draw_curves(tmp_path / "out.png", runs)
        return found[0]

    return draw


def test_charts_without_data_are_not_drawn_nor_is_a_constant_number_of_loops(drawn):
    def titles(**runs):
        return [axes.get_title().partition("\n")[0] for axes in drawn(**runs).axes]

    constant, varying = lines_of(9, mean_loops=2.0), lines_of(9, lr=0.1)
    for line in varying:
        line["mean_loops"] = 1 + 1 / line["step"]
    sources = lines_of(9, **{"val_bpb/a": 1.5, "val_bpb/b": 2.5})
    assert titles(a=constant) == ["bits per byte"]
    assert titles(a=varying) == ["bits per byte", "loops until halting", "learning rate"]
    assert titles(a=constant, b=lines_of(9, mean_loops=3.0)) == [
        "bits per byte",
        "loops until halting",
    ]
    assert titles(a=sources) == ["bits per byte", curves.BY_SOURCE]
    assert titles(a=[dict(bytes_seen=1)]) == []


def test_charts_mark_epochs_name_the_last_losses_and_have_no_legend_on_the_loss(drawn):
    lines = lines_of(10, lr=0.125)
    figure = drawn(run=lines)
    loss, lr = figure.axes
    assert loss.get_title().partition("\n")[2] == "training 1.25, validation 2.4 (lowest 2)"
    assert lr.get_title().partition("\n")[2] == "0.125"
    assert loss.get_legend() is None and len(figure.legends) == 1
    for axes in figure.axes:
        marks = [line.get_xdata()[0] for line in axes.lines if [*line.get_ydata()] == [0, 1]]
        assert marks == pytest.approx([0.3, 0.7])  # after steps 3 and 7, in million bytes
    many = [line | dict(epoch=line["step"]) for line in lines_of(curves.EPOCHS + 2)]
    assert curves.beginnings(many[:-1]) and not curves.beginnings(many)
    _, legend = drawn(first=lines, second=lines[:6]).legends
    assert [text.get_text() for text in legend.texts] == [
        "first: training 1.25, validation 2.4 (lowest 2)",
        "second: training 1.25, validation 2",
    ]


def test_legend_of_sources_stands_above_their_curves(drawn):
    axes = drawn(run=lines_of(9, **{f"val_bpb/{name}": 2.5 for name in "abcd"})).axes[-1]
    assert [text.get_text() for text in axes.get_legend().texts] == [
        f"{name}: 2.5" for name in "abcd"
    ]
    low, high = axes.get_ylim()
    assert (high - 2.5) / (high - low) > 0.6  # without it, a half
    assert len({line.get_color() for line in axes.lines if len(line.get_xdata()) == 9}) == 4


def test_a_directory_without_a_label_has_its_name_for_one_also_if_that_holds_an_equals_sign(
    tmp_path, monkeypatch
):
    for name in ("a", "x=y"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "a")
    for argument, label, directory in (
        (".", "a", "."),
        ("../x=y", "x=y", "../x=y"),
        ("mine=../a", "mine", "../a"),
        ("mine=../x=y", "mine", "../x=y"),
    ):
        assert curves.labelled(argument) == (label, Path(directory))


def test_a_run_draws_its_curves_at_its_end_and_never_fails_for_them(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    shards, picture = make_shards(tmp_path / "data"), tmp_path / "run" / "curves.png"
    monkeypatch.setattr(curves, "draw_curves", draw_curves)  # which conftest replaces

    def trained(steps: int) -> str:
        assert train.command_line(run_flags(shards, picture.parent, steps=steps)) == 0
        return capsys.readouterr().err

    assert "could not draw" not in trained(2) and picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    curves.write_curves(picture.parent, signal.SIGTERM)
    assert not picture.exists()
    with monkeypatch.context() as patch:  # as if it were not installed
        for name in ("matplotlib", "matplotlib.figure"):
            patch.setitem(sys.modules, name, None)
        assert "could not draw" not in trained(3) and not picture.exists()
    picture.mkdir()
    assert "could not draw curves.png" in trained(4)


def test_curves_of_several_runs_are_one_picture_and_what_is_missing_is_a_line(
    tmp_path, monkeypatch, capsys, recwarn
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    lines = [
        dict(step=step, bytes_seen=step, loss=2, val_bpb=1, **{"val_bpb/a": 1, "val_bpb/b": 2})
        for step in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.png"
    for argv, said in (
        ([], "usage"),
        (["a"], "a: there is no metrics.jsonl"),
        ([f"a={tmp_path}", f"b={tmp_path / 'gone'}"], f"{tmp_path / 'gone'}: there is no"),
    ):
        assert curves.main([str(out), *argv]) == 2 and not out.exists()
        assert capsys.readouterr().err.startswith(f"curves.py: error: {said}")
    monkeypatch.setattr(curves, "draw_curves", lambda path, runs: drawn.append([*runs]))
    drawn = []
    assert curves.main([str(out), str(tmp_path), f"x={tmp_path}", f"x={tmp_path}/."]) == 0
    assert drawn == [[tmp_path.name, "x", f"x={tmp_path}/."]]  # none replaces another
    monkeypatch.setattr(curves, "draw_curves", draw_curves)
    assert (
        curves.main(
            [str(out), *(f"{label}={tmp_path}" for label in ("$\\frac$", "_", "a\x1b[2J", "漢"))]
        )
        == 0
    )
    assert (
        out.read_bytes().startswith(b"\x89PNG")
        and capsys.readouterr().err == ""
        and not recwarn.list
    )
    assert curves.main([str(tmp_path), f"a={tmp_path}"]) == 2
