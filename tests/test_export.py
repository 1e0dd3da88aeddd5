"""An export is whole, carries its code and its facts, and is read back by train.py and sample.py
without trust."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import sample
from conftest import ROOT, final_state, refused, run_python, text
from exporting import (
    checkpoint,
    exported,
    load_model,
    load_tokenizer,
    model,
    spider,
    tokenizer,
)
from spider import export
from spider.checkpoint import load_checkpoint
from spider.common import locked
from spider.export import flat_modules
from train import command_line

MODULES = flat_modules("spider.modeling_spider")


def resuming(tmp_path, origin, *flags) -> list[str]:
    """The command line of a run of two steps that starts from an export."""
    settings = "--mock_data --seq_len 32 --micro_batch 2 --max_steps 2 --eval_every 0 --device cpu"
    paths = ["--ckpt_dir", str(tmp_path / "resumed"), "--resume", str(origin)]
    return settings.split() + paths + list(flags)


def refusal(capsys, *argv) -> str:
    """Run sample.py, which must fail; return its error."""
    return refused(argv, capsys, program="sample.py", main=sample.main)


# --------------------------------------------------------------------------------------------------
# Writing


def test_an_export_has_settings_weights_card_license_and_code(exported):
    assert {file.name for file in exported.iterdir()} == MODULES.keys() | {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer_config.json",
        "README.md",
        "LICENSE",
    }
    assert (exported / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "\nlicense: apache-2.0\n" in (exported / "README.md").read_text().split("---")[1]
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1  # readable for all


def test_a_loaded_export_runs_the_code_beside_it(exported, model):
    for name, code in MODULES.items():
        assert (exported / name).read_text() == code
    adapter = type(model).__module__
    assert type(model.spider).__module__ == adapter.replace("modeling_spider", "spider_model")


# A program in which some modules cannot be imported
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
for name in {names}:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
"""


@pytest.mark.slow
def test_a_script_loads_an_export_without_the_project_and_without_noise(exported, spider, tmp_path):
    ours = ["spider_model", "tile_moe", "tokenizer", "spider", "data"]
    script = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer("abc def", return_tensors="pt")
torch.save(model(**inputs).logits, sys.argv[2])
"""
    out = tmp_path / "logits.pt"
    done = run_python(WITHOUT.format(names=ours) + script, exported, out, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torchao" not in done.stderr and "Failed to load" not in done.stderr
    with torch.no_grad():
        expected = spider(torch.tensor([list(b"abc def")]), n_loops=3).logits
    torch.testing.assert_close(torch.load(out), expected)


UNIX_ONLY = ["fcntl", "grp", "pwd", "resource", "termios"]


@pytest.mark.slow
def test_an_export_writes_where_modules_of_unix_are_missing(exported, spider, tmp_path):
    imports = """
import os, signal
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizer
"""
    script = """
for name in ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1"):
    delattr(signal, name)
for name in ("fork", "geteuid", "getuid", "sysconf", "O_NOFOLLOW"):
    delattr(os, name)
sys.platform = "win32"
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer("abc def", return_tensors="pt")
print(model.generate(**inputs, max_new_tokens=9, do_sample=False)[0].tolist())
"""
    program = imports + WITHOUT.format(names=UNIX_ONLY) + script
    done = run_python(program, exported, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    prompt = list(b"abc def")
    written = json.loads(done.stdout.splitlines()[-1])[len(prompt) :]
    expected = list(spider.generate(prompt, 9, temperature=0, n_loops=3))
    assert written[: len(expected)] == expected


def test_a_model_that_transformers_saves_and_loads_again_is_the_same(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = load_model(tmp_path)
    ids = text(1, 30)
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert again.config.to_dict()["n_loops"] == 3
    assert again.generation_config.suppress_tokens == model.generation_config.suppress_tokens
    assert load_tokenizer(tmp_path)("a<bos>é")["input_ids"] == tokenizer("a<bos>é")["input_ids"]
    for name, weight in load_checkpoint(tmp_path)["model_state_dict"].items():
        assert torch.equal(weight, model.state_dict()[f"spider.{name}"])


def test_an_export_replaces_nothing(checkpoint, exported, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for origin, target, remedy in (
        (checkpoint, tmp_path / "full", "exists and is not an empty directory: use another name"),
        (checkpoint, tmp_path / "pipe", "exists and is not an empty directory"),
        (exported, tmp_path / "new", "--export needs a checkpoint of a training run"),
    ):
        assert remedy in refusal(capsys, origin, "--export", target)
    assert sorted(os.listdir(tmp_path)) == ["full", "pipe"]


def test_a_failed_export_leaves_nothing_and_can_be_repeated(
    checkpoint, tmp_path, monkeypatch, capsys
):
    written = []

    def fail(weights, path, metadata):
        written.append(path)
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        for name in ("empty", "new"):
            line = refusal(capsys, checkpoint, "--export", tmp_path / name)
            assert f"{name} cannot be written: No space left on device" in line
    assert os.listdir(tmp_path) == ["empty"] and not os.listdir(tmp_path / "empty")

    left = written[0].parent  # as if the process had been killed
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    argv = [checkpoint, "--export", tmp_path / "empty"]
    with locked(tmp_path / "empty", tmp_path / ".empty.lock"):
        assert "another command is using it" in refusal(capsys, *argv)
        assert os.listdir(left)
    assert sample.main([*map(str, argv)]) == 0
    assert os.listdir(tmp_path) == ["empty"]
    size = sum(file.stat().st_size for file in (tmp_path / "empty").iterdir())
    assert f": {size:,} bytes" in capsys.readouterr().err


def test_the_model_card_has_facts_and_foreign_text_as_json_alone(checkpoint, tmp_path, capsys):
    heading = "5\n\n# Not so <img src=x onerror=alert(1)>\n```\n\x1b[2J"
    saved = torch.load(checkpoint)
    saved["flags"] |= {"data_dir": f"/home/me/{heading}/", heading: heading, "seq_len": 48}
    saved |= dict(best_loss=float("inf"), exploded=True)  # never evaluated
    torch.save(saved, tmp_path / "spider-step6.pt")
    shutil.copy(checkpoint.parent / "metrics.jsonl", tmp_path)
    last_step = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "val_bpb": 1}\n')
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "out")]) == 0
    assert "the loss had exploded" in capsys.readouterr().err
    card = (tmp_path / "out" / "README.md").read_text()
    above, _, rest = card.partition("```json\n")
    block, _, below = rest.partition("\n```\n")
    assert "Not so" not in above + below and card.isascii() and "\x1b" not in card
    facts = json.loads(block)
    assert facts["checkpoint"] == "spider-step6.pt"
    assert facts["bytes_seen"] == saved["bytes_seen"]
    assert facts["val_bpb"] == last_step["val_bpb"] and facts["val_bpb_at_step"] == 6
    assert "best_val_bpb" not in facts
    assert facts["flags"]["lr"] == 0.01
    assert facts["flags"][heading] == heading
    assert facts["flags"]["data_dir"] == heading  # a name, no private path
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training"].items() <= facts.items()
    assert config["max_position_embeddings"] == 48


# --------------------------------------------------------------------------------------------------
# Flattening


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Lay out a project of modules by their paths."""
    monkeypatch.setattr(export, "ROOT", tmp_path)
    monkeypatch.setattr(export, "PROJECT", ("top", "pack", "other", "alone"))

    def lay(modules: dict[str, str]):
        for name, code in modules.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)

    return lay


def test_imports_are_followed_wherever_they_stand_and_those_of_others_stay(project):
    project(
        {
            "top.py": "import os\nfrom pack.a import (x,\n    y)\nfrom torch import nn\n",
            "pack/a.py": (
                "if True:\n    from pack.b import z\n"
                "def f():\n    from alone import w  # from alone import\n"
            ),
            "pack/b.py": (
                "from pack.a import x  # a circle\nfrom alone import w; from pack.c import v\n"
            ),
            "pack/c.py": 'TEXT = "from alone import nothing"\n',
            "alone.py": "",
            "unused.py": "",
        }
    )
    assert flat_modules("top") == {
        "top.py": "import os\nfrom .a import (x,\n    y)\nfrom torch import nn\n",
        "a.py": (
            "if True:\n    from .b import z\n"
            "def f():\n    from .alone import w  # from alone import\n"
        ),
        "b.py": "from .a import x  # a circle\nfrom .alone import w; from .c import v\n",
        "c.py": 'TEXT = "from alone import nothing"\n',
        "alone.py": "",
    }


@pytest.mark.parametrize(
    "line",
    (
        "import pack.a",
        "import os, alone",
        "from pack import a",
        "from . import a",
        "from .a import x",
        "from pack.a import x; from other.a import y",
    ),
)
def test_an_import_that_no_flat_directory_can_have_is_an_error(project, line):
    project({"top.py": line, "pack/a.py": "", "other/a.py": "", "alone.py": ""})
    with pytest.raises(ValueError, match="exported modules must|another module is also named a.py"):
        flat_modules("top")


# --------------------------------------------------------------------------------------------------
# Reading back


@pytest.mark.parametrize("file", ("", "model.safetensors"))
def test_a_run_starts_with_the_weights_of_an_export_and_can_be_resumed(
    exported, checkpoint, tmp_path, capsys, file
):
    line = refused(resuming(tmp_path, exported / file), capsys)
    assert "add --reset_steps" in line  # an export has no optimizer state
    unchanging = "--reset_steps --lr 1e-9 --engram_lr 0".split()
    assert command_line(resuming(tmp_path, exported / file, *unchanging)) == 0
    saved = final_state(tmp_path / "resumed")
    assert saved["step"] == 2 and saved["n_loops"] == 3 and saved["recipe"] == "tiny"
    weights = torch.load(checkpoint)["model_state_dict"]
    table = "engram_input.table.weight"
    assert torch.equal(saved["model_state_dict"][table], weights[table])
    for name, weight in weights.items():
        torch.testing.assert_close(saved["model_state_dict"][name], weight, atol=5e-3, rtol=0)
    argv = resuming(tmp_path, exported / file, *unchanging, "--max_steps", "3")
    for flag in ("--resume", str(exported / file), "--reset_steps"):
        argv.remove(flag)
    assert command_line(argv) == 0
    assert final_state(tmp_path / "resumed")["step"] == 3


def test_an_export_is_scored_like_its_checkpoint(exported, checkpoint, tmp_path, figures):
    (tmp_path / "text").write_bytes(b"abc def gh " * 20)
    texts = (checkpoint.parent.parent / "data", tmp_path / "text")
    origins = (checkpoint, exported, exported / "model.safetensors")
    found = figures(*origins, "--eval", *texts)
    for figure in found:
        del figure["checkpoint"]
        assert (figure["seq_len"], figure["n_loops"]) == (32, 3)
    assert found[:2] == found[2:4] == found[4:]


def test_nothing_of_an_export_is_executed_or_read_but_config_and_weights(exported, tmp_path):
    directory = shutil.copytree(exported, tmp_path / "copy")
    mark = tmp_path / "executed"
    for name in MODULES:
        (directory / name).write_text(f"open({str(mark)!r}, 'w')")
    for name in ("pytorch_model.bin", "model.pt", "spider-step9.pt"):
        (directory / name).write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR.")
    assert command_line(resuming(tmp_path, directory, "--reset_steps")) == 0
    assert load_checkpoint(directory)
    assert not mark.exists()


@pytest.fixture
def in_several_files(model, tmp_path) -> Path:
    """An export whose weights are in several files."""
    directory = tmp_path / "shards"
    model.save_pretrained(directory, max_shard_size="200KB")
    assert len([*directory.glob("model-*.safetensors")]) > 2
    return directory


def test_weights_in_several_files_are_read_by_their_index(exported, in_several_files, tmp_path):
    one = load_checkpoint(exported)["model_state_dict"]
    several = load_checkpoint(in_several_files)["model_state_dict"]
    assert one.keys() == several.keys()
    for name, weight in one.items():
        assert torch.equal(weight, several[name]), name
    assert command_line(resuming(tmp_path, in_several_files, "--reset_steps")) == 0


def edit_json(path: Path, keys: str, value: object):
    """Set a value of a JSON file by its keys from the outermost on, with / between."""
    content = json.loads(path.read_text())
    *outer, last = keys.split("/")
    inner = content
    for key in outer:
        inner = inner[key]
    inner[last] = value
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "name", ("../shards/model-00001-of-00002.safetensors", "absolute", "config.json", 3)
)
def test_an_index_names_only_weights_of_its_directory(exported, in_several_files, capsys, name):
    if name == "absolute":
        name = str(exported / "model.safetensors")
    index = in_several_files / "model.safetensors.index.json"
    edit_json(index, "weight_map/spider.null_segment", name)
    assert "can be read safely" in refusal(capsys, in_several_files, "--prompt", "a")
    shutil.copy(exported / "model.safetensors", in_several_files)  # then no index counts
    assert load_checkpoint(in_several_files)["step"] == 6


def in_config(keys: str, value: object):
    """Return a function that sets a value of an export's config.json."""
    return lambda directory: edit_json(directory / "config.json", keys, value)


def config_of(content: str):
    """Return a function that replaces an export's config.json."""
    return lambda directory: (directory / "config.json").write_text(content)


def with_weight(name: str, weight: torch.Tensor | None):
    """Return a function that sets a weight of an export, or deletes it."""

    def spoil(directory: Path):
        path = directory / "model.safetensors"
        weights = load_file(path) | {name: weight}
        save_file({name: w for name, w in weights.items() if w is not None}, path)

    return spoil


def pipe_instead_of(name: str):
    """Return a function that replaces a file of an export by a pipe."""

    def spoil(directory: Path):
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return spoil


@pytest.mark.parametrize(
    "spoil",
    (
        in_config("n_loops", 1 << 40),
        in_config("n_loops", 0),
        in_config("spider", None),
        in_config("spider/code", "x"),  # no field of it
        in_config("spider/hidden_size", 48),
        in_config("spider/hidden_size", 1 << 40),
        in_config("training", 3),
        in_config("training/step", -1),
        in_config("training/flags/seq_len", "32"),
        in_config("training/flags/eval_tokens", 1 << 70),
        *(config_of(content) for content in ("no JSON", "[]", "{}", "[" * 100_000)),
        with_weight("spider.null_segment", torch.ones(32, dtype=torch.bool)),
        with_weight("spider.null_segment", torch.ones(33)),
        with_weight("spider.null_segment", None),
        with_weight("more", torch.ones(2)),
        lambda directory: os.truncate(directory / "config.json", 900),
        lambda directory: os.truncate(directory / "model.safetensors", 900),
        lambda directory: (directory / "config.json").unlink(),
        lambda directory: (directory / "model.safetensors").unlink(),
        pipe_instead_of("config.json"),
        pipe_instead_of("model.safetensors"),
    ),
)
def test_a_spoilt_export_is_refused_in_a_line(exported, tmp_path, capsys, spoil):
    directory = shutil.copytree(exported, tmp_path / "copy")
    spoil(directory)
    line = refused(resuming(tmp_path, directory, "--reset_steps"), capsys)
    assert str(directory) in line
