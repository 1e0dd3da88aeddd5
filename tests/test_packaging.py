"""The wheel: it holds the package alone, with the files that the package reads, and can be imported where it lies."""

import shutil
import subprocess
import sys
import zipfile

import pytest

from conftest import ROOT
from test_house import ADAPTER, MODULES, SCRIPTS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from a copy of the tree, since setuptools writes beside pyproject.toml."""
    pytest.importorskip("build")
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True,
                             check=True, text=True).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    done = subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out], cwd=source,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_alone_and_all_of_it(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"spider"}
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "spider").rglob("*")
             if path.is_file() and "__pycache__" not in path.parts}
    assert files <= names, f"missing from the wheel: {sorted(files - names)}"
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_every_module_of_the_wheel_can_be_imported_beside_the_tokenizer_alone(wheel, tmp_path):
    """In a directory that has neither a checkout nor another script. The adapter is made for an export."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "beside").mkdir()
    shutil.copy(ROOT / "tokenizer.py", tmp_path / "beside")
    modules = sorted(MODULES.keys() - SCRIPTS - {ADAPTER})
    probe = f"""
import importlib, sys
sys.path[:0] = [{str(tmp_path / "site")!r}, {str(tmp_path / "beside")!r}]
for name in {modules}:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as fault:  # an extra that is not installed
        if fault.name.partition(".")[0] in {{"spider", *{sorted(SCRIPTS)}}}:
            raise
    else:
        assert module.__file__.startswith(sys.path[0]), module.__file__
"""
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path / "beside", capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr


def test_flags_and_files_need_nothing_beside_the_package(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    done = subprocess.run([sys.executable, "-c", "import spider.flags, spider.files; print(spider.flags.__file__)"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == str(tmp_path / "spider/flags.py"), done.stderr
