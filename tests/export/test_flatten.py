"""Whatever the adapter imports of the project lies flat beside it, or the export is refused."""

import re

import pytest

from spider.export import flatten
from spider.export.flatten import flat_modules


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A function that lays down a project's modules by path."""
    monkeypatch.setattr(flatten, "ROOT", tmp_path)

    def lay(**texts):
        for name, text in texts.items():
            path = tmp_path / f"{name.replace('__', '/', 1)}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return lay


def test_imports_are_followed_wherever_they_stand_and_those_of_others_stay(project):
    project(top="import os\nfrom pack.a import (x,\n                    y)\nfrom torch import nn\n",
            pack__a="if True:\n    from pack.b import z\ndef f():\n    from alone import w  # from alone import\n",
            pack__b="from pack.a import x  # a circle\nfrom alone import w; from pack.c import v\n",
            pack__c='TEXT = "from alone import nothing"\n', alone="", unused="")
    assert flat_modules("top") == {
        "top.py": "import os\nfrom .a import (x,\n                    y)\nfrom torch import nn\n",
        "a.py": "if True:\n    from .b import z\ndef f():\n    from .alone import w  # from alone import\n",
        "b.py": "from .a import x  # a circle\nfrom .alone import w; from .c import v\n",
        "c.py": 'TEXT = "from alone import nothing"\n', "alone.py": ""}


def test_two_modules_of_one_name_are_an_error(project):
    project(top="from pack.a import x\nfrom other.a import y\n", pack__a="", other__a="")
    with pytest.raises(ValueError, match="other.a: another module is also named a.py"):
        flat_modules("top")


@pytest.mark.parametrize("line", ("import pack.a", "import alone", "import os, alone", "from pack import a",
                                  "from . import a", "from .a import x"))
def test_an_import_that_no_flat_directory_can_have_is_an_error(project, line):
    project(top=f"\n{line}\n", pack__a="", alone="")
    project(**{"pack____init__": ""})
    with pytest.raises(ValueError, match=re.escape(f"top.py:2: {line}: exported modules must")):
        flat_modules("top")
