"""The layout: which module may import which."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
PACKAGE = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.glob("spider/**/*.py"))
    if path.stem != "__init__"
}
MODULES = SCRIPTS | PACKAGE


def imported(module: str) -> set[str]:
    """Return our modules that a module imports anywhere, also in functions, but not for type hints
    alone."""
    nodes = [ast.parse(MODULES[module].read_text())]
    names = set()
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        nodes += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f"{node.module}.{name.name}" for name in node.names)
    return names & MODULES.keys()


IMPORTS = {module: imported(module) for module in MODULES}


def reachable(module: str) -> set[str]:
    """Return the modules that a module imports, directly or not."""
    found = set()
    unread = [module]
    while unread:
        new = IMPORTS[unread.pop()] - found
        found |= new
        unread += new
    return found


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_itself_by_way_of_others(module):
    assert module not in reachable(module)


ADAPTER = "spider.inference.modeling_spider"  # copied into an export, beside spider_model.py
ABOVE_THE_MODEL = {
    ADAPTER,
    "spider.inference.load",
    "spider.inference.sampling",
    "spider.inference.adapt",
    "spider.inference.look",
}  # they use a finished model
OUTSIDE = {
    "spider.inference.load",
    "spider.inference.sampling",
    "spider.inference.adapt",
    "spider.inference.look",
    "spider.inference.export",
    ADAPTER,
    "sample",
    "bench",
}
OF_TRAIN = {
    "spider.training.plan",
    "spider.training.log",
}  # parts of train.py that nobody uses beside others
TRAINING = OF_TRAIN | {
    "spider.training.optim",
    "spider.training.checkpoint",
    "spider.training.run",
    "spider.training.distributed",
    "spider.training.estimate",
    "data",
}


@pytest.mark.parametrize("module", [*sorted(PACKAGE.keys() - OF_TRAIN), "spider_model", "tile_moe"])
def test_modules_that_are_used_without_the_trainer_import_no_script(module):
    allowed = {"tile_moe"} if module == "spider_model" else set()
    if module in ABOVE_THE_MODEL:
        allowed.add("spider_model")
    assert IMPORTS[module] & SCRIPTS.keys() <= allowed


def test_model_imports_nothing_of_training_and_training_nothing_of_export_or_viewing():
    assert not reachable("train") & OUTSIDE
    assert "train" not in reachable("sample")
    assert not reachable("spider_model") & (OUTSIDE | TRAINING)
    assert not reachable("data") & (OUTSIDE | {"spider_model"} | TRAINING - {"data"})
