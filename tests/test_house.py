"""The rooms: imports go one way, type hints included."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ["model", "data", "training", "inference"]  # each may import itself and those before it
TOP = "config vocabulary errors flags files threads machine __version__".split()
SCRIPTS = {path.stem for path in ROOT.glob("*.py")}
FILES = sorted([ROOT / "spider_model.py", ROOT / "tile_moe.py", *ROOT.glob("spider/**/*.py")])


def imports(node: ast.AST, typing: bool = False):
    """Yield (module, name, whether for type checkers only) of all imports in a file."""
    typing = typing or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    if isinstance(node, ast.Import):
        yield from ((alias.name, "", typing) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "no relative imports"
        yield from ((node.module, alias.name, typing) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, typing)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    room = "model" if path.parent == ROOT else path.parent.name
    rooms = ROOMS[: ROOMS.index(room) + 1] if room in ROOMS else []
    scripts = {"spider_model", "tile_moe"} if room in ("training", "inference") else set()
    if path.name == "spider_model.py":
        scripts = {"tile_moe"}
    for module, name, typing in imports(ast.parse(path.read_text())):
        package, _, rest = module.partition(".")
        if package == "spider":
            assert (rest.partition(".")[0] or name) in {*TOP, *rooms}, (module, name)
        elif package in SCRIPTS - scripts:
            assert (module, name, typing) == ("train", "Flags", True), (module, name)
