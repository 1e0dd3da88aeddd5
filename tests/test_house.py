"""The rooms: imports go one way, type hints included."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import (.*))?", re.MULTILINE)
ROOMS = ["model", "data", "training", "inference"]  # each may import those before it
TOP = "config vocabulary errors flags files threads machine".split()
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
MODULES = sorted(ROOT.glob("spider/**/*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_the_rooms_before_it_and_no_script_but_the_model(path):
    room = path.parent.name
    allowed = {*TOP, "__version__"}
    scripts = set()
    if room in ROOMS:
        allowed |= {*ROOMS[: ROOMS.index(room) + 1]}
        scripts = {"spider_model", "tile_moe"} if room in ("training", "inference") else set()
    for module, names in IMPORT.findall(path.read_text()):
        if module in SCRIPTS:
            assert module in scripts or (module, names) == ("train", "Flags")
        elif module.split(".")[0] == "spider":
            imported = module.split(".")[1:2] or names.split(", ")
            assert {name.partition(" as ")[0] for name in imported} <= allowed
