"""The layout: which module imports which, how long files and functions are, who takes `args`, and the words."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = {path.relative_to(ROOT).as_posix(): path.read_text() for folder, pattern in (
    (ROOT, "*.py"), (ROOT / "spider", "**/*.py"), (ROOT / "tests", "**/*.py"), (ROOT / "docs", "**/*.py"))
    for path in sorted(folder.glob(pattern))}
TREES = {name: ast.parse(text) for name, text in FILES.items()}
MODULES = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in FILES
           if not name.startswith(("tests/", "docs/"))}
SCRIPTS = {module for module, name in MODULES.items() if "/" not in name}
ADAPTER = "spider.export.modeling_spider"  # what an export takes along, where spider_model.py lies beside it

LAYERS = 9
FILE, TRAIN, TEST_FILE, CLASS, FUNCTION, MAIN, LINE = 700, 900, 450, 260, 62, 100, 120


def listed(found: set[str]) -> str:
    """Name what breaks a rule, a line each."""
    return "\n".join(sorted(found))


def imported(tree: ast.AST) -> set[str]:
    """Modules of ours that a tree imports anywhere: in functions and behind `if TYPE_CHECKING` too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "an import relative to its module"
            found |= {f"{node.module}.{name.name}" if f"{node.module}.{name.name}" in MODULES else node.module
                      for name in node.names}
    return found & MODULES.keys()


IMPORTS = {module: imported(TREES[name]) - {module} for module, name in MODULES.items()}


def circles() -> list[list[str]]:
    """Groups of modules that import one another, at whatever distance."""
    def reach(module: str) -> set[str]:
        found, ahead = set(), [module]
        while ahead:
            new = IMPORTS[ahead.pop()] - found
            found |= new
            ahead += new
        return found
    reached = {module: reach(module) for module in IMPORTS}
    groups = {tuple(sorted(m for m in reached if module in reached[m] and m in reached[module]))
              for module in reached if module in reached[module]}
    return sorted(map(list, groups))


def functions(module_only: bool = False):
    """Every function with its file and qualified name; of modules only, or of tests and docs too."""
    def walk(node: ast.AST, above: str):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            inside = f"{above}.{child.name}".lstrip(".") if named else above
            if named:
                yield inside, child
            yield from walk(child, inside)
    for name, tree in TREES.items():
        if not module_only or name in MODULES.values():
            for inside, node in walk(tree, ""):
                yield name, inside, node


def lines_of(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def docstrings(name: str):
    """Docstrings of a file, with a number of line."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


# ---------------------------------------------------------------------------------------------------------------------
# Imports


def test_no_modules_import_one_another_in_a_circle():
    assert not (fault := listed({" ".join(group) for group in circles()})), fault


def test_the_package_imports_of_the_top_level_nothing_but_the_tokenizer():
    found = {f"{module} imports {name}" for module, names in IMPORTS.items()
             if module not in SCRIPTS and module != ADAPTER for name in names & SCRIPTS - {"tokenizer"}}
    assert not (fault := listed(found)), fault
    assert IMPORTS[ADAPTER] & SCRIPTS <= {"spider_model", "tokenizer"}


def test_a_package_imports_none_above_it():
    """Model and data know nothing of training; training knows nothing of what looks at its runs or hands them on."""
    above = {"spider.model": ("training", "data", "inference", "inspect", "export", "dev"),
             "spider.data": ("training", "model", "inference", "inspect", "export", "dev"),
             "spider.training": ("inference", "inspect", "export", "dev"),
             "spider.inference": ("dev",), "spider.inspect": ("dev",), "spider.export": ("dev",)}
    found = {f"{module} imports {name}" for module, names in IMPORTS.items()
             for name in names for package in above.get(module.rpartition(".")[0], ())
             if name.startswith(f"spider.{package}")}
    low = {module for module in MODULES if module.count(".") == 1 and not MODULES[module].endswith("__init__.py")}
    found |= {f"{module} imports {name}" for module in low for name in IMPORTS[module] if name not in low}
    assert not (fault := listed(found)), fault


def test_modules_stand_in_at_most_nine_layers():
    @cache
    def layer(module: str) -> int:
        return 1 + max(map(layer, IMPORTS[module]), default=0)
    def path(module: str) -> list[str]:
        return [module, *path(max(IMPORTS[module], key=layer))] if IMPORTS[module] else [module]
    found = {module for module in IMPORTS if layer(module) > LAYERS}
    assert not (fault := listed(found)), f"{fault}\n{' > '.join(path(max(IMPORTS, key=layer)))}"


def test_help_is_answered_without_torch():
    """Of what train.py imports before its flags, nothing takes seconds."""
    heavy = {"torch", "numpy", "loguru", "torchao", "bitsandbytes", "wandb"}
    ahead = ["spider.flags", "spider.model.config", "spider.training.plan"]
    seen = set()
    while ahead:
        module = ahead.pop()
        seen.add(module)
        for node in TREES[MODULES[module]].body:
            names = [name.name for name in node.names] if isinstance(node, ast.Import) else [
                node.module] if isinstance(node, ast.ImportFrom) else []
            assert not heavy & {name.partition(".")[0] for name in names}, (module, names)
        ahead += IMPORTS[module] - seen


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def test_no_file_is_too_long():
    found = set()
    for name, text in FILES.items():
        limit = TRAIN if name == "train.py" else TEST_FILE if name.startswith("tests/") else FILE
        if len(text.splitlines()) > limit:
            found.add(name)
    assert not (fault := listed(found)), fault


def test_no_class_or_function_is_too_long():
    found = set()
    for name, inside, node in functions(module_only=True):
        limit = CLASS if isinstance(node, ast.ClassDef) else MAIN if inside == "main" else FUNCTION
        if lines_of(node) > limit:
            found.add(f"{name}: {inside}")
    assert not (fault := listed(found)), fault


def test_no_line_is_wider_than_120_columns():
    found = {name for name, text in FILES.items() if any(len(line) > LINE for line in text.splitlines())}
    assert not (fault := listed(found)), fault


# ---------------------------------------------------------------------------------------------------------------------
# The namespace of a command line


def is_namespace(argument: ast.arg, function: ast.FunctionDef) -> bool:
    """Tell a namespace of flags from the positional arguments that a hook of torch is given."""
    hint = ast.unparse(argument.annotation) if argument.annotation else ""
    return "Namespace" in hint or argument.arg == "args" and any(
        isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "args"
        for node in ast.walk(function))


def test_outside_train_py_no_function_takes_args():
    found = {f"{name}: {inside}" for name, inside, node in functions(module_only=True)
             if isinstance(node, ast.FunctionDef) and name not in ("train.py", "spider/flags.py")
             for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
             if is_namespace(argument, node)}
    assert not (fault := listed(found)), fault


def test_nothing_changes_args_once_they_are_parsed():
    found = set()
    for name, inside, node in functions(module_only=True):
        if not isinstance(node, ast.FunctionDef) or inside == "parse_args":
            continue
        for part in ast.walk(node):
            targets = part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(
                part, (ast.AugAssign, ast.AnnAssign)) else []
            changed = any(re.match(r"args\b.", ast.unparse(target)) for target in targets) or isinstance(
                part, ast.Call) and re.match(r"(setattr|delattr)\(args\b|vars\(args\)\.", ast.unparse(part))
            if changed:
                found.add(f"{name}: {inside}")
    assert not (fault := listed(found)), fault


# ---------------------------------------------------------------------------------------------------------------------
# Words

# Private words, each with what an engineer of this field writes.
WORDS = {
    r"\.\./shared|\bmodel\.md\b": "the paper, or what is needed of it",
    r"\bmake_real\b": "materialize",
    r"\btake_(recipe|batch|horizon|recompute)\b": "settle",
    r"\bplaces_behind\b": "segment_offsets",
    r"\bhand(s|ed|ing)? back\b": "unpool, return",
    r"\brows left\b": "active rows",
    r"\bsays of itself\b": "describes",
    r"\bis no fault\b": "is not an error",
    r"\b(run|command|training|rank|it|that|others?) goes on\b": "resumes, continues",
    r"\bhow a run is left\b|\bwhat survives\b": "stopping; atomic checkpoints",
}


@pytest.mark.parametrize("word", WORDS)
def test_no_private_word_is_left(word):
    found = {name for name, text in FILES.items() if name != "tests/test_house.py" and re.search(word, text)}
    assert not (fault := listed(found)), f"say {WORDS[word]}:\n{fault}"


def test_every_module_says_what_it_is_for():
    found = {name for name in FILES if not (ast.get_docstring(TREES[name]) or not FILES[name].strip())}
    assert not (fault := listed(found)), fault


def test_no_docstring_begins_with_what_or_whether():
    found = {name for name in FILES if any(re.match("(What|Whether|How)\\b", text) for _, text in docstrings(name))}
    assert not (fault := listed(found)), fault
