"""--show records what the model computes; nothing in a terminal or a page is obeyed."""

import html
import io
import json
import math
import re
import shutil
import subprocess
import sys
from bisect import bisect
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

import sample
from conftest import awake, make_shards, metrics, run, small_config
from spider import inspect
from spider.common import DataError
from spider_model import Spider
from tokenizer import BOS_ID

# markup, control characters, invisible ones, and bytes that are not UTF-8
ODD = (
    "<script>alert(1)</script> \x1b]0;t\x07\x9b2J \u202e\u2028\x00\t\r\n é漢🕸 "
    "</title></style>\"'&amp;".encode()
    + b"\xff\xf0\x9f \\n"
)
NO_CORE = dict(n_recurrent_layers=0, engram_layers=())


def model_of(**changes) -> Spider:
    model = awake(small_config(**changes), dtype=torch.float64).eval()
    if model.core is not None and model.core.halt_predictor is not None:
        model.core.halt_predictor.weight.data.normal_(std=1.0)  # so that segments take 1 to 3 loops
    return model


def text_of(length: int) -> bytes:
    generator = torch.Generator().manual_seed(0)
    return bytes(torch.randint(32, 127, (length,), generator=generator).tolist())


@pytest.fixture
def show(tmp_path, capsys):
    """Return what --show of a text prints, and the page that it writes to look.html."""

    def show(model: Spider, text: bytes, directory: Path = tmp_path) -> tuple[str, str]:
        (tmp_path / "text").write_bytes(text)
        inspect.show(model, 3, str(tmp_path / "text"), directory, dict(step=3), None)
        return capsys.readouterr().out, (directory / "look.html").read_text()

    return show


def printed_by(shown: inspect.Shown) -> str:
    return "".join(inspect.in_terminal(shown, colour=False))


def data_block(page: str) -> str:
    return re.search('id="data">(.*?)</script>', page)[1]


def data_of(page: str) -> dict:
    """Return the data that a page draws."""
    return json.loads(data_block(page))


class Page(HTMLParser):
    """The elements of a page with their attributes, and its text by element."""

    def __init__(self, page: str):
        super().__init__()
        self.elements = []
        self.text = {}
        self.innermost = None
        self.feed(page)
        self.close()

    @property
    def tags(self) -> list[str]:
        return [tag for tag, _ in self.elements]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.innermost = tag

    def handle_data(self, data):
        self.text[self.innermost] = self.text.get(self.innermost, "") + data


# --------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize("length", (1, 560))
def test_what_is_recorded_is_what_the_full_pass_computes(length):
    model = model_of()
    text = text_of(length)
    shown = inspect.read(model, text, 3)
    record = shown.record
    ids = torch.tensor([[BOS_ID, *text]])
    labels = torch.tensor([[*text, -100]])
    out = model(ids, labels, n_loops=3)
    assert len(shown.bits) == length
    assert sum(shown.bits) / length * math.log(2) == pytest.approx(
        out.nats_per_byte.item(), rel=1e-9
    )
    assert len(record.loops) == int(out.segments)
    assert sum(record.loops) == pytest.approx(float(out.mean_loops) * len(record.loops))
    for layer, tokens in enumerate(out.tokens_per_expert):
        loads = [load for visit, load in record.load.items() if visit.layer == layer]
        assert torch.equal(sum(loads, torch.zeros(4)), tokens.float())
    if length > 1:
        assert len(set(record.loops)) > 1  # else this compares nothing


@pytest.mark.parametrize("changes", ({}, NO_CORE), ids=("core", "no core"))
def test_a_long_text_is_read_in_windows_up_to_the_last_end_of_a_segment(monkeypatch, changes):
    monkeypatch.setattr(inspect, "WINDOW", 64)
    model = model_of(**changes)
    text = text_of(300)
    windows = []
    with model.register_forward_pre_hook(lambda _, args: windows.append(args[0])):
        shown = inspect.read(model, text, 3)
    assert len(windows) > 5

    ids = [BOS_ID, *text]
    starts = [
        next(i for i in range(301) if ids[i : i + 64] == window[0].tolist()) for window in windows
    ]
    begins = [0, *(start + 32 for start in starts[1:])]  # after half a window of context
    ends = [*begins[1:], 301]
    assert starts[0] == 0 and all(start > 0 for start in starts[1:])
    bits = []
    for window, start, begin, end in zip(windows, starts, begins, ends, strict=True):
        assert begin < end <= start + 64
        if end < 301:
            assert shown.record.ends[end - 1] if not changes else end == start + 64
        log_p = model(window, n_loops=3).logits[0].detach().log_softmax(-1)
        scored = range(begin, min(end, 300))
        bits += [-float(log_p[n - start, ids[n + 1]]) / math.log(2) for n in scored]
    assert shown.bits == pytest.approx(bits, rel=1e-9)
    loops = shown.record.loops
    assert len(loops) == sum(shown.record.ends) == shown.segment[-1] + shown.ends[-1]
    if not changes:
        assert min(loops) == 1 and max(loops) == 3
        for visit, gates in shown.record.gates.items():  # of the segments that have not halted
            assert sorted(gates) == [i for i, count in enumerate(loops) if count > visit.loop]
        # 2 layers, and 2 experts a token
        assert sum(load.sum() for load in shown.record.load.values()) == sum(loops) * 2 * 2
        assert sum(map(len, shown.record.byte_gates)) == 301


@pytest.fixture
def ends_at(monkeypatch):
    """Have every model end segments at the bytes for which a condition of their index holds."""

    def choose(is_end):
        def boundaries(self, predicted, packed, *_):
            count = packed.input_ids.numel()
            return torch.tensor([is_end(i, count) for i in range(count)]).double()

        monkeypatch.setattr(Spider, "boundaries", boundaries)

    return choose


def test_facts_count_the_segments_that_end_in_the_text(ends_at):
    ends_at(lambda i, count: True)  # also at BOS
    _, segments, loops = inspect.facts(inspect.read(model_of(), text_of(40), 2))
    assert segments.startswith("40 segments")
    assert sum(map(int, re.findall(r"\((\d+) segments\)", loops))) == 40


def test_recorded_gates_are_those_that_the_model_multiplies_by(monkeypatch):
    model = model_of()
    text = text_of(40)
    before = inspect.read(model, text, 2)
    engram = type(model.core.layers[1].engram)
    monkeypatch.setattr(engram, "gate", lambda self, h, key: h.new_full((len(h), 1), 0.25))
    model.engram_output.gate.weight.data.zero_()
    after = inspect.read(model, text, 2)
    assert after.bits != before.bits
    assert set(torch.cat(after.record.byte_gates).flatten().tolist()) == {0.5}
    for gates in after.record.gates.values():
        assert set(gates.values()) == {0.25}
    for gates in before.record.gates.values():
        assert all(0 < value < 1 and value != 0.25 for value in gates.values())


def test_halted_segments_are_told_apart_where_they_stay_in_the_products_as_on_a_gpu():
    model = model_of()
    loops = inspect.read(model, text_of(200), 3).record.loops
    assert set(loops) > {1}
    model.core.drop_halted = False
    assert inspect.read(model, text_of(200), 3).record.loops == loops
    assert model.core.drop_halted is False


def test_a_model_is_unchanged_by_inspection_even_after_an_error(monkeypatch):
    model = model_of()
    inspect.read(model, b"abc", 2)
    monkeypatch.setattr(model, "after_core", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        inspect.read(model, b"abc", 2)
    assert "boundaries" not in vars(model) and model.core.drop_halted is None
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_text_is_a_file_or_standard_input_or_stands_for_itself(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_bytes(b"from a file")
    assert inspect.take_text(str(path)) == (b"from a file", "text")
    assert inspect.take_text("no file, \udcff") == (b"no file, \xff", "a text")
    path.write_bytes(b"")
    with pytest.raises(DataError, match="empty"):
        inspect.take_text(str(path))
    monkeypatch.setattr(inspect, "LONGEST", 1024)
    path.write_bytes(b"x" * 1024)
    assert inspect.take_text(str(path)) == (b"x" * 1024, "text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x" * 1025)))
    name = "the first 1,024 bytes of standard input"
    assert inspect.take_text("-") == (b"x" * 1024, name)


# --------------------------------------------------------------------------------------------------
# In a terminal and as a page


def test_nothing_that_is_shown_reaches_a_terminal_as_a_command(show, monkeypatch):
    model = model_of()
    plain, _ = show(model, ODD)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    coloured, _ = show(model, ODD)
    assert coloured.count("\x1b") > 20
    monkeypatch.setenv("NO_COLOR", "1")
    assert show(model, ODD)[0] == plain
    for printed in (plain, re.sub(r"\x1b\[0[0-9;]*m", "", coloured)):
        assert all(c.isprintable() or c == "\n" for c in printed)
        text = re.sub("[│⁰¹²³⁴-⁹]", "", printed)
        assert text.startswith(
            "<script>alert(1)</script> \\x1b]0;t\\x07\\x9b2J \\u202e\\u2028\\x00\\t\\r↵\n é漢🕸 </ti"
        )
        assert "&amp;\\xff\\xf0\\x9f \\n" in text


def test_a_terminal_shows_the_beginning_of_a_long_text(monkeypatch):
    monkeypatch.setattr(inspect, "PRINTED", 14)
    shown = inspect.read(model_of(boundaries="words"), "Größe 漢字 and more".encode(), 2)
    printed = printed_by(shown).replace("│", "")
    assert printed.startswith("Größe 漢字 ... (all 23 bytes are on the page)\n\n")
    assert "23 bytes, " in printed


def test_a_character_of_several_bytes_is_one_with_all_of_their_bits(ends_at):
    ends_at(lambda i, count: True)
    text = "a漢\xe9".encode() + b"\xe6\xbc!"
    characters = list(inspect.characters(text))
    assert characters == [
        ("a", 0, 1),
        ("漢", 1, 4),
        ("é", 4, 6),
        ("\\xe6", 6, 7),
        ("\\xbc", 7, 8),
        ("!", 8, 9),
    ]
    model = model_of()
    shown = inspect.read(model, text, 3)
    line, _, _ = printed_by(shown).partition("\n")
    assert re.sub("[│¹²³]", "|", line) == "a|漢|é|\\xe6|\\xbc|!|"  # no end within a character
    data = inspect.page_data(shown, model, [])
    assert data["glyphs"] == [character.glyph for character in characters]
    assert data["lengths"] == "132111"
    assert data["bits"] == pytest.approx(shown.bits, abs=0.006)


def test_a_page_has_the_likeliest_bytes_of_the_model():
    model = model_of()
    text = text_of(40)
    data = inspect.page_data(inspect.read(model, text, 3), model, [])
    logits = model(torch.tensor([[BOS_ID, *text]]), n_loops=3).logits[0, :-1]
    share, likeliest = logits.softmax(-1).topk(3)
    assert data["likeliest"] == likeliest.flatten().tolist()
    assert data["percent"] == pytest.approx((100 * share).flatten().tolist(), abs=0.51)
    assert data["names"][10] == "\\n"


def test_loops_of_a_segment_stand_behind_the_character_in_which_it_ends(ends_at):
    ends_at(lambda i, count: i < count - 2)  # after the first of the last three bytes
    shown = inspect.read(model_of(), text_of(60) + "漢".encode(), 3)
    loops = shown.record.loops
    assert len(set(loops)) > 1 and shown.segment[-1] == len(loops)
    line, _, _ = printed_by(shown).partition("\n")
    assert line.endswith("漢" + "⁰¹²³"[loops[-1]])


@pytest.mark.parametrize(
    "changes",
    (
        {},
        NO_CORE,
        dict(n_routed_experts=0),
        dict(act=False),
        dict(engram_layers=()),
        dict(engram_byte_orders=()),
        dict(engram_match_words=(1, 2)),
    ),
    ids=str,
)
def test_a_page_shows_whatever_the_model_has(changes, show):
    text = ODD * 4
    model = model_of(**changes)
    printed, page = show(model, text)
    data = data_of(page)
    gates = {row["name"]: row["levels"] for row in data["gates"]}
    kinds = dict(data["meanings"])
    has_core = model.core is not None
    assert ("segments, " in printed) == bool(data["loops"]) == has_core
    assert bool(data["load"]) == (has_core and model.config.n_routed_experts > 0)
    assert ("layer 2, loop 1" in gates) == bool(model.config.engram_layers)
    assert ("last 1 byte" in gates) == bool(model.config.engram_byte_orders)
    assert "last 24, in the text" in gates and "last n, in the text" in kinds
    has_words = 2 in model.config.engram_match_words
    assert ("word 2, in the text" in gates) == ("word n, in the text" in kinds) == has_words
    assert {len(levels) for levels in gates.values()} == {len(text)} == {len(data["ends"])}
    assert data["bytes"] == text.hex()


@pytest.mark.parametrize("tables", ((), (1, 2)), ids=str)
def test_a_page_has_votes_in_nats_and_gates_of_matches_only_without_tables(tables, show):
    model = model_of(engram_votes=2, engram_match_words=(1,), engram_byte_orders=tables)
    model.engram_output.votes[2].weight.data[1::2] = 0  # of the older occurrences
    _, page = show(model, b"abcd abcd abce")
    rows = {row["name"]: row for row in data_of(page)["gates"]}
    votes = rows["last 3, its vote"]["levels"]
    has_vote = [level != " " for level in votes]
    assert has_vote == [False] * 7 + [True] * 6 + [False]
    assert "0" in votes  # below 0, as no gate is
    assert inspect.levels_of(torch.tensor([0.0, 0.25, 9.0]), inspect.VOTES) == "127"
    assert "word 1, its vote" in rows
    for name, row in rows.items():
        assert (row["shades"] == "votes") == ("vote" in name)
    assert ("last 3, in the text" in rows) == (tables == ())


def test_levels_are_digits_and_a_space_for_nan():
    values = torch.tensor([-0.1, 0.0, 0.25, math.nan, 9.0])
    assert inspect.levels_of(values, inspect.VOTES) == "012 7"
    assert inspect.shade(0.5) == ";38;5;255;48;5;53"  # of half a bit to one


def test_a_page_has_all_data_as_text_and_loads_nothing(tmp_path, show):
    home = tmp_path / "<img src=x onerror=alert(2)>&\x1b"
    home.mkdir()
    _, page = show(model_of(), ODD + b"{{policy}} {{data}}", home)
    parsed = Page(page)
    template = inspect.TEMPLATE.read_text()
    assert parsed.tags == Page(template).tags and parsed.tags.count("script") == 2
    for _, attrs in parsed.elements:
        for name in attrs:
            assert not name.startswith("on") and name not in ("src", "href", "style")
    assert "://" not in page
    assert str(tmp_path) not in page  # paths are private
    assert all(c.isprintable() or c == "\n" for c in page)
    assert parsed.text["title"] == "<img src=x onerror=alert(2)>&\\x1b reads text"

    block = data_block(page)
    assert block.isascii() and not re.search("[<>&]", block)
    text = "".join(data_of(page)["glyphs"])
    assert text.startswith("<script>alert(1)</script> \\x1b]0;t")
    assert text.endswith("{{policy}} {{data}}")

    (policy,) = [attrs["content"] for _, attrs in parsed.elements if "http-equiv" in attrs]
    script = re.search("<script>(.*?)</script>", template, re.DOTALL)[1]
    assert script in page
    source = inspect.hash_of(script)
    assert policy.startswith(f"default-src 'none'; script-src '{source}'; style-src 'sha256-")
    assert not re.search("innerHTML|outerHTML|insertAdjacent|document.write|eval|Function", script)


def test_a_page_names_a_checkpoint_that_is_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "exported").mkdir()
    monkeypatch.chdir(tmp_path / "exported")  # as an export may be
    inspect.show(model_of(), 1, "abc", Path("."), dict(step=3), None)
    assert Page(Path("look.html").read_text()).text["title"] == "exported reads a text"


needs_chromium = pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")


def open_in_browser(page: Path) -> str:
    """Open a page in a browser; return its elements as HTML. Nothing may be logged to the
    console."""
    flags = (
        "--headless --no-sandbox --disable-gpu --virtual-time-budget=3000 --enable-logging=stderr "
        "--dump-dom"
    )
    done = subprocess.run(
        ["chromium", *flags.split(), page.as_uri()], text=True, capture_output=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_chromium
def test_a_browser_draws_the_page_and_runs_nothing_from_the_text(tmp_path, show):
    text = b"a<img src=x onerror=document.title='pwned'>" + ODD
    _, page = show(model_of(), text)
    data = data_of(page)
    drawn = Page(open_in_browser(tmp_path / "look.html"))
    assert "pwned" not in drawn.text["title"] and "img" not in drawn.tags
    assert drawn.text["b"].replace("\n", "").replace("↵", "\\n") == "".join(data["glyphs"])
    bits = iter(data["bits"])
    levels = set()
    for length in data["lengths"]:
        of_character = sum(next(bits) for _ in range(int(length)))
        levels.add(f"s{bisect(inspect.BITS, of_character)}")
    assert levels == {attrs["class"] for tag, attrs in drawn.elements if tag == "b"}
    classes = [attrs.get("class") for _, attrs in drawn.elements]
    assert classes.count("tape") == math.ceil(len(text) / 64)
    assert drawn.tags.count("tr") == 1 + len(data["load"])


POINTER = (
    "document.querySelector('[data-i=\"0\"]')"
    ".dispatchEvent(new PointerEvent('pointerover', { bubbles: true }));"
)
ARROW_KEY = "by('text').dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }));"


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("event", (POINTER, ARROW_KEY), ids=("pointer", "key"))
def test_a_browser_shows_the_likeliest_bytes_of_a_character_and_a_long_text(
    tmp_path, show, monkeypatch, event
):
    template = inspect.TEMPLATE.read_text().replace("</script></body>", f"{event}</script></body>")
    (tmp_path / "page.html").write_text(template)
    monkeypatch.setattr(inspect, "TEMPLATE", tmp_path / "page.html")
    text = "é".encode() + text_of(5000)
    _, page = show(model_of(**NO_CORE), text)
    dom = open_in_browser(tmp_path / "look.html")
    percent = data_of(page)["percent"][:6]
    assert re.findall("<td>([0-9]+%)</td>", dom) == [f"{share}%" for share in percent]
    drawn = Page(dom)
    (about,) = [attrs for tag, attrs in drawn.elements if tag == "output"]
    assert "left:" in about["style"] and "hidden" not in about
    assert 1024 <= drawn.tags.count("b") < 5001  # the rest is plain text until it is near
    shown = re.search('id="text".*?>(.*?)</section>', dom, re.DOTALL)[1]
    assert html.unescape(re.sub("<[^>]*>", "", shown)) == text.decode()


# --------------------------------------------------------------------------------------------------
# sample.py --show


def test_show_prints_a_text_and_writes_the_page_beside_the_checkpoint(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    directory = run(tmp_path, make_shards(tmp_path / "data"), steps=3)
    assert sample.main([str(directory), "--show", "abc def", "--n_loops", "1"]) == 0
    out = capsys.readouterr().out
    assert "7 bytes, " in out and "loops: 1 (" in out and str(directory / "look.html") in out
    data = data_of((directory / "look.html").read_text())
    assert bytes.fromhex(data["bytes"]) == b"abc def"
    model, *facts = data["run"]
    assert model.startswith("tiny, ")
    assert facts == [
        "step 3",
        "trained on 192 bytes",
        "data: data",
        f"validation at step 3: {metrics(directory)[-1]['val_bpb']:.3f} bits per byte",
    ]


def test_html_names_the_page_and_bad_paths_are_refused(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    checkpoint = str(trained / "spider-step3.pt")
    assert sample.main([checkpoint, "--show", "abc", "--html", "out.html"]) == 0
    assert bytes.fromhex(data_of(Path("out.html").read_text())["bytes"]) == b"abc"
    for page in ("/dev/null", "gone/x.html"):
        assert sample.main([checkpoint, "--show", "a", "--html", page]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("sample.py: error: ")
