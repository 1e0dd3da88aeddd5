"""Name the classes of a model that are not this project's, so that no other class runs on its weights unnoticed."""

import sys
from pathlib import Path

from torch import nn

OURS = ("spider", "spider_model", "tile_moe", "torch", "torchao", "builtins")


def foreign_classes(model: nn.Module) -> list[str]:
    """Return the paths of the classes that a model was made with and that are neither ours nor torch's, sorted:
    ["my_idea.GatedMLA", "my_idea.MySpider"]. A class of the script that runs has the name of its file.

    FSDP and FP8 make classes of their own of a module's; the class below them counts."""
    found = set()
    for module in model.modules():
        foreign = [base for base in type(module).__mro__ if base.__module__.partition(".")[0] not in OURS]
        found.update(path_of(base) for base in foreign[:1])
    return sorted(found)


def path_of(kind: type) -> str:
    """Return module.Class."""
    module = kind.__module__
    if module == "__main__":
        module = Path(getattr(sys.modules[module], "__file__", None) or module).stem
    return f"{module}.{kind.__qualname__}"
