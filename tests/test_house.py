"""The layout: which module imports which, that five files hold the trainer, and how wide lines
are."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder, pattern in (
        (ROOT, "*.py"),
        (ROOT / "spider", "**/*.py"),
        (ROOT / "tests", "**/*.py"),
    )
    for path in sorted(folder.glob(pattern))
}
MODULES = {
    name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ast.parse(text)
    for name, text in FILES.items()
    if not name.startswith("tests/")
}
SCRIPTS = {module for module in MODULES if not module.startswith("spider")} | {"spider_model"}
THE_FIVE = ("train.py", "spider_model.py", "tile_moe.py", "data.py", "tokenizer.py")
ADAPTER = "spider.modeling_spider"  # copied into an export, beside spider_model.py
ABOVE_THE_MODEL = {ADAPTER, "spider.inference", "spider.inspect"}  # they use a finished model


def imported(tree: ast.AST) -> set[str]:
    """Return our modules that a tree imports anywhere, in functions and behind `if TYPE_CHECKING`
    too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return found & MODULES.keys() - {"spider"}


IMPORTS = {module: imported(tree) - {module} for module, tree in MODULES.items()}


def reachable(module: str) -> set[str]:
    """Return the modules that a module imports, directly or not."""
    found, ahead = set(), [module]
    while ahead:
        new = IMPORTS[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_no_modules_import_one_another_in_a_circle():
    assert not [module for module in MODULES if module in reachable(module)]


def test_the_package_imports_no_script_but_the_tokenizer():
    for module in MODULES.keys() - SCRIPTS - ABOVE_THE_MODEL:
        assert IMPORTS[module] & SCRIPTS <= {"tokenizer"}, module


def test_the_model_knows_nothing_of_training_and_training_nothing_of_export_and_viewing():
    outside = {"spider.inference", "spider.inspect", "spider.export", ADAPTER, "sample", "bench"}
    assert not reachable("train") & outside
    training = {
        "spider.optim",
        "spider.checkpoint",
        "spider.run",
        "spider.distributed",
        "spider.estimate",
        "data",
    }
    assert not reachable("spider_model") & (outside | training)
    assert not reachable("data") & (outside | training - {"data"} | {"spider_model"})


def test_five_files_hold_the_trainer():
    lines = {
        name: len(text.splitlines())
        for name, text in FILES.items()
        if not name.startswith("tests/")
    }
    del lines["spider/first_hour.py"]  # commands that run the trainer
    assert sum(lines[name] for name in THE_FIVE) / sum(lines.values()) > 0.3


def test_no_line_is_wider_than_100_columns():
    assert not [
        name for name, text in FILES.items() if any(len(line) > 100 for line in text.splitlines())
    ]
