"""The wheel holds the package and the scripts, and works without a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import spider
from conftest import ROOT

pytestmark = pytest.mark.slow
SCRIPTS = {path.name for path in ROOT.glob("*.py")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build a wheel and unpack it, as pip does. Build from a copy of the tree, because setuptools
    writes next to pyproject.toml."""
    pytest.importorskip("build")
    pytest.importorskip("setuptools", minversion="77")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(out / "site")
    return out / "site"


def run(site: Path, directory: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Run Python with only the wheel, in a directory without a checkout."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=os.environ | dict(PYTHONPATH=str(site)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_wheel_holds_exactly_the_package_and_the_scripts(site):
    found = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "spider").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in found if ".dist-info/" not in name} == package | SCRIPTS
    assert (site / f"spider_trainer-{spider.__version__}.dist-info").is_dir()


def test_export_from_a_wheel_holds_the_license_and_the_code(site, tmp_path):
    (site / "torch").mkdir()  # pip installs other packages into the same directory
    flags = "--mock_data --max_steps=1 --seq_len=64 --micro_batch=2 --eval_every=0 --device=cpu"
    run(site, tmp_path, "-m", "train", *flags.split(), "--ckpt_dir=run")
    run(site, tmp_path, "-m", "sample", "run", "--export", "exported")
    found = {path.name for path in (tmp_path / "exported").iterdir()}
    assert {"LICENSE", "model.safetensors", "modeling_spider.py", "spider_model.py"} <= found
    (site / "torch").rmdir()
