"""Flatten the adapter and all project modules that it imports into one directory: `flat_modules`.

transformers only loads code beside a model if its imports are `from .name import ...`. So imports of project modules
are rewritten, `from spider.model.config import X` to `from .config import X`; all other text is kept.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def flat_modules(name: str) -> dict[str, str]:
    """Return the texts of a module, given by its dotted name, and of all project modules that it imports, by file name.

    Imports are followed recursively, including those in functions and for type checkers. Raise ValueError if two
    modules have the same file name, or an import is not `from module import name`."""
    texts, modules, found = {}, [name], {name}
    for module in modules:                # grows in the loop
        file = f"{module.rpartition('.')[2]}.py"
        if file in texts:
            raise ValueError(f"{module}: another module is also named {file}")
        texts[file], imported = with_relative_imports(module)
        modules += [other for other in imported if other not in found]
        found |= {*imported}
    return texts


def source_of(module: str) -> Path | None:
    """Return the path of one of the project's modules or packages; None for other modules."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_name(f"{path.name}.py"), path / "__init__.py") if file.is_file()), None)


def with_relative_imports(module: str) -> tuple[str, list[str]]:
    """Return a module's text with relative imports of project modules, and the unique names of these."""
    path, imported = source_of(module), {}
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level if node.level else node.module]
        for name in names:
            if not name.startswith(".") and (source := source_of(name)) is None:
                continue
            line = lines[node.lineno - 1]
            if isinstance(node, ast.Import) or node.level or source.name == "__init__.py":
                raise ValueError(f"{path}:{node.lineno}: {line.strip()}: exported modules must import project modules "
                                 f"by `from module import name`")
            short = name.rpartition(".")[2]
            pattern = rf"\bfrom {re.escape(name)} import\b"
            lines[node.lineno - 1] = re.sub(pattern, f"from .{short} import", line, count=1)
            imported[name] = None
    return "".join(lines), [*imported]
