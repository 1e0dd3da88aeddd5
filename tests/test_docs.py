"""README, docs and the scripts of runs/ name only what exists: links, paths, modules, flags.

What is written in several files agrees: the range of torch, the systems that are supported."""

import contextlib
import importlib
import re
import sys
import tomllib
from functools import cache
from io import StringIO

import pytest
import yaml

from conftest import ROOT, refused, resolved
from spider.config import SpiderConfig

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
WITH_COMMANDS = [*PAGES, *sorted(ROOT.glob("runs/*.sh")), *sorted(ROOT.glob("configs/*.toml"))]
ENTRIES = {"train": "command_line", "sample": "main", "data": "main", "bench": "main"}
# a command of an older commit stands in a line that says so
FORMER = re.compile(r"commit|earlier|not kept|then\)")


def prose(page) -> str:
    """Return a page without its blocks of code."""
    return re.sub(r"```.*?```|^    .*?$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page) -> set[str]:
    """Return the anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def flags_of(script: str, command: str = "") -> set[str]:
    """Return the flags in the help of a script, or of one of its commands."""
    out = StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        getattr(importlib.import_module(script), ENTRIES[script])(
            [*([command] if command else []), "--help"]
        )
    usage = out.getvalue()
    assert "--help" in usage
    return set(re.findall(r"--\w+", usage))


def commands(page) -> list[tuple[str, str]]:
    """Return (script, arguments) of every command of ours in a page; what follows a comment or a
    pipe is left out."""
    text = page.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not FORMER.search(line)]
    return [
        (script, re.split(r" # |\s{2,}#|`|\||&&|> ", rest)[0])
        for line in lines
        for script, rest in re.findall(r"\b(train|sample|data|bench)\.py((?: .*)?)$", line)
        if rest
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_path_of_the_project_that_a_page_names_exists(page):
    folders = "docs|tests|spider|configs|runs"
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\w)", page.read_text()):
        assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")) or "cuda" in path, path


def test_the_tree_has_a_line_for_every_script_module_and_folder_and_for_nothing_else():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## What is where\n")[1].split("\n## ")[0]
    listed = [line for line in tree.splitlines() if line.startswith("    ")]
    names = [line.split()[0] for line in listed]
    assert all(len(line.split()) > 3 for line in listed)  # and words for it
    files = [*ROOT.glob("*.py"), *ROOT.glob("spider/**/*.py")]
    modules = [path.name for path in files if path.name != "__init__.py"]
    rooms = [f"{path.parent.name}/" for path in ROOT.glob("spider/*/__init__.py")]
    folders = "spider/ configs/ runs/ tests/ docs/".split()
    assert sorted(names) == sorted([*modules, *rooms, *folders])


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_every_flag_in_a_command_is_one_of_its_script(page):
    for script, rest in commands(page):
        command = (
            (re.match(r" (prepare|verify|show)\b", rest) or [""])[0].strip()
            if script == "data"
            else ""
        )
        for word in rest.split():
            if word.startswith("--"):
                flags = flags_of(script, command)
                if script == "bench":
                    flags = flags | flags_of("train")
                assert re.match(r"--\w+", word)[0] in flags, (script, word)


@pytest.mark.parametrize(
    "page",
    [page for page in WITH_COMMANDS if "results" not in page.parts],
    ids=lambda page: page.name,
)
def test_every_command_that_trains_has_a_directory_of_its_own(page):
    """In the default one it would resume whatever was trained there before."""
    for script, rest in commands(page):
        if script == "train" and "--data_dir" in rest:
            assert re.search("--(ckpt_dir|mock_data|help|dry_run)", rest), rest


def test_every_part_that_the_guide_switches_off_can_be():
    table = (
        (ROOT / "docs/guide/training.md")
        .read_text()
        .split("can be switched off")[1]
        .split("\n\n")[1]
    )
    changes = re.findall(r"`(\w+=[\w+]*)`", table)
    assert len(changes) > 10
    for change in changes:
        assert resolved("--model", "base", "--set", change).config != SpiderConfig.preset("base")


def test_the_range_of_torch_is_the_same_in_pyproject_the_install_commands_and_ci():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [name for name in project["dependencies"] if re.match(r"torch\W", name)]
    for page in ("README.md", "runs/shakespeare.sh"):
        assert f'pip install "{torch}" --index-url' in (ROOT / page).read_text()

    first, last = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups())
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    ends = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert [end["torch"] for end in ends] == [f"2.{first}.0", f"2.{last - 1}.0"]
    assert f">={ends[0]['python']}" == project["requires-python"]


def test_ci_runs_the_test_command_of_readme():
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^    (pip install .* && pytest.*)$", readme, re.MULTILINE)
    assert {*command.split(" && ")} <= {*(ROOT / ".ci/run").read_text().splitlines()}


@pytest.mark.parametrize("script", ENTRIES)
def test_on_windows_a_script_ends_with_one_line_that_names_wsl(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    main = getattr(importlib.import_module(script), ENTRIES[script])
    assert "WSL" in refused(["--help"], capsys, program=f"{script}.py", main=main)
