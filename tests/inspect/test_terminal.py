"""A text in a terminal: whole characters, and no commands."""

import re
import sys

import pytest
from looking import ODD, model_of, show

from spider.inspect import reading, terminal
from spider.inspect.page import page_data


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
        start = "<script>alert(1)</script> \\x1b]0;t\\x07\\x9b2J \\u202e\\u2028\\x00\\t\\r↵\n é漢🕸 </ti"
        assert kept.startswith(start)
        assert "&amp;\\xff\\xf0\\x9f \\n" in kept


def test_a_character_of_several_bytes_is_one_with_all_of_their_bits(capsys):
    text = "a漢\xe9".encode() + b"\xe6\xbc!"
    found = list(reading.characters(text))
    assert found == [("a", 0, 1), ("漢", 1, 4), ("é", 4, 6), ("\\xe6", 6, 7), ("\\xbc", 7, 8), ("!", 8, 9)]
    shown = reading.read(model_of(boundaries="every_byte"), text, 3)
    plain = "".join(terminal.in_terminal(shown, False)).split("\n")[0]
    assert re.sub("[│¹²³]", "|", plain) == "a|漢|é|\\xe6|\\xbc|!|"           # never within one
    drawn = page_data(shown, model_of(boundaries="every_byte"), [])
    assert drawn["characters"] == found and drawn["bits"] == pytest.approx(shown.bits, abs=1e-4)

