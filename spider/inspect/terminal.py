"""Show segments, loops and surprise of a text in a terminal."""

from bisect import bisect
from collections.abc import Iterator

from spider.inspect.reading import BITS, Shown, characters, facts

SHADES = ((252, 234), (255, 53), (255, 89), (255, 125), (16, 166), (16, 208), (16, 220), (16, 229))  # of 256 colours:
                                          # (text, background), as in the color map "inferno", for any terminal theme
SMALL_DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def in_terminal(shown: Shown, colour: bool) -> Iterator[str]:
    """Yield the text with its segments and a legend, in plain characters or with ANSI colors."""
    differ, now = len(set(shown.record.loops)) > 1, ""

    def turn(style: str) -> str:
        nonlocal now
        before, now = now, style
        return f"\x1b[0{style}m" if colour and style != before else ""

    def shade(level: int) -> str:
        return ";38;5;{};48;5;{}".format(*SHADES[level])
    for glyph, start, stop in characters(shown.text):
        level = bisect(BITS, sum(shown.bits[start:stop]))
        yield turn(shade(level) + ";4" * (shown.segment[stop - 1] % 2)) + glyph.replace("\\n", "↵")
        if any(shown.ends[start:stop]):
            if differ:
                yield turn(";2") + str(shown.loops_of(stop - 1)).translate(SMALL_DIGITS)
            elif not colour:
                yield "│"
        if glyph == "\\n":
            yield turn("") + "\n"
    yield turn("") + "\n" * (1 if shown.text.endswith(b"\n") else 2)
    if colour:
        names = ("0", *(f"{bits:g}" for bits in BITS))
        yield "bits: " + "".join(turn(shade(level)) + f" {name} " for level, name in enumerate(names)) + turn("")
        yield " and more; every other segment is underlined" if any(shown.ends) else " and more"
    elif any(shown.ends):
        yield "segments end at │" if not differ else "segments end at a number, the number of their loops"
    if colour and differ:
        yield ", the small number is the number of its loops"
    yield "\n" + "\n".join(facts(shown))
