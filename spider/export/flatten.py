"""Flatten the adapter and all of the project that it imports into the modules of one directory: `flat_modules`.

transformers loads the code beside a model only where every import of it reads `from .name import ...`. So each module
keeps its text but for the imports of the project's own modules, which become such: `from spider.model.config import X`
becomes `from .config import X`.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def flat_modules(name: str) -> dict[str, str]:
    """Return the text of a module, by its dotted name, and of all of the project's that it imports, by file name.

    The imports are followed, also those in functions and for type checkers. ValueError where two modules would have one
    file name, and where one is imported otherwise than by `from module import name`."""
    texts, modules, found = {}, [name], {name}
    for module in modules:                # which grows
        file = f"{module.rpartition('.')[2]}.py"
        if file in texts:
            raise ValueError(f"{module}: there is another module of this name: {file} cannot stand for both")
        texts[file], imported = with_relative_imports(module)
        modules += [other for other in imported if other not in found]
        found |= {*imported}
    return texts


def source_of(module: str) -> Path | None:
    """Return the path of one of the project's modules or packages; None for a module of others."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_name(f"{path.name}.py"), path / "__init__.py") if file.is_file()), None)


def with_relative_imports(module: str) -> tuple[str, list[str]]:
    """Return a module's text with relative imports of the project's modules, and the names of these, each once."""
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
                raise ValueError(f"{path}:{node.lineno}: {line.strip()}: an exported module imports others of the "
                                 f"project by `from module import name` alone")
            short = name.rpartition(".")[2]
            pattern = rf"\bfrom {re.escape(name)} import\b"
            lines[node.lineno - 1] = re.sub(pattern, f"from .{short} import", line, count=1)
            imported[name] = None
    return "".join(lines), [*imported]
