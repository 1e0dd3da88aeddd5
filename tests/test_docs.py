"""README, docs, configs and scripts name only existing links, paths, modules and flags.

Facts that several files state agree: torch's range, the test command, the supported systems."""

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
# marks a line with a command of an older commit
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
    """Return the flags in the --help of a script, or of one of its commands."""
    out = StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        getattr(importlib.import_module(script), ENTRIES[script])(
            [*([command] if command else []), "--help"]
        )
    usage = out.getvalue()
    assert "--help" in usage
    return set(re.findall(r"--\w+", usage))


def commands(page) -> list[tuple[str, str]]:
    """Return (script, arguments) of each of our commands in a page, up to a comment or a pipe."""
    text = page.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not FORMER.search(line)]
    return [
        (script, re.split(r" # |\s{2,}#|`|\||&&|> ", rest)[0])
        for line in lines
        for script, rest in re.findall(r"\b(train|sample|data|bench)\.py((?: .*)?)$", line)
        if rest
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_existing_files_and_headings(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_project_paths_in_pages_exist(page):
    folders = "docs|tests|spider|configs|runs"
    for path in re.findall(rf"(?<![\w/.-])((?:{folders})/[\w/.-]*\w)", page.read_text()):
        assert (ROOT / path).exists() or list(ROOT.glob(f"{path}*")) or "cuda" in path, path


def test_file_tree_lists_exactly_the_scripts_modules_and_folders():
    tree = (ROOT / "CONTRIBUTING.md").read_text().split("## What is where\n")[1].split("\n## ")[0]
    listed = [line for line in tree.splitlines() if line.startswith("    ")]
    names = [line.split()[0] for line in listed]
    assert all(len(line.split()) > 3 for line in listed)  # each with a description
    files = [*ROOT.glob("*.py"), *ROOT.glob("spider/**/*.py")]
    modules = [path.name for path in files if path.name != "__init__.py"]
    rooms = [f"{path.parent.name}/" for path in ROOT.glob("spider/*/__init__.py")]
    folders = "spider/ configs/ runs/ tests/ docs/".split()
    assert sorted(names) == sorted([*modules, *rooms, *folders])


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_flags_in_commands_exist_in_their_script(page):
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
def test_every_training_command_has_its_own_ckpt_dir(page):
    """In the default directory it would resume whatever was trained there before."""
    for script, rest in commands(page):
        if script == "train" and "--data_dir" in rest:
            assert re.search("--(ckpt_dir|mock_data|help|dry_run)", rest), rest


def test_switches_in_the_training_guide_change_the_model():
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


def test_torch_range_agrees_in_pyproject_install_commands_and_ci():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [name for name in project["dependencies"] if re.match(r"torch\W", name)]
    for page in ("README.md", "runs/shakespeare.sh"):
        assert f'pip install "{torch}" --index-url' in (ROOT / page).read_text()

    first, last = map(int, re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups())
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    ends = workflow["jobs"]["tests"]["strategy"]["matrix"]["include"]
    assert [end["torch"] for end in ends] == [f"2.{first}.0", f"2.{last - 1}.0"]
    assert f">={ends[0]['python']}" == project["requires-python"]


def test_ci_runs_the_test_command_of_the_readme():
    readme = (ROOT / "README.md").read_text()
    (command,) = re.findall(r"^    (pip install .* && pytest.*)$", readme, re.MULTILINE)
    assert {*command.split(" && ")} <= {*(ROOT / ".ci/run").read_text().splitlines()}


@pytest.mark.parametrize("script", ENTRIES)
def test_scripts_on_windows_exit_with_one_line_that_names_wsl(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "platform", "win32")
    main = getattr(importlib.import_module(script), ENTRIES[script])
    assert "WSL" in refused(["--help"], capsys, program=f"{script}.py", main=main)
