"""An export is whole, carries its code and its facts, and is read back by train.py and sample.py
without trust."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import sample
from conftest import ROOT, final_state, refused, text
from exporting import (
    checkpoint,
    export_without_end,
    exported,
    loaded,
    loaded_tokenizer,
    model,
    spider,
    tokenizer,
)
from jobs import LIMIT, until
from spider import export
from spider.checkpoint import load_checkpoint
from spider.export import flat_modules
from train import command_line

MODULES = flat_modules("spider.modeling_spider")
BY_SAMPLE = dict(program="sample.py", main=sample.main)


def resuming(tmp_path, origin, *flags) -> list[str]:
    return [
        "--mock_data",
        "--seq_len",
        "32",
        "--micro_batch",
        "2",
        "--max_steps",
        "2",
        "--eval_every",
        "0",
        "--device",
        "cpu",
        "--ckpt_dir",
        str(tmp_path / "on"),
        "--resume",
        str(origin),
        *flags,
    ]


# --------------------------------------------------------------------------------------------------
# Writing


def test_an_export_has_code_license_and_files_that_all_can_read(exported, model):
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
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1
    for name in MODULES:
        code, [source] = (
            (exported / name).read_text(),
            [*ROOT.glob(name), *ROOT.glob(f"spider/**/{name}")],
        )
        assert re.sub("from [.]", "from ", code) == re.sub(
            "from spider[.](?:[a-z_]+[.])*(?=[a-z_]+ import)", "from ", source.read_text()
        )
    assert type(model.spider).__module__ == type(model).__module__.replace(
        "modeling_spider", "spider_model"
    )


@pytest.mark.slow
def test_a_plain_script_loads_an_export_without_the_project_and_without_noise(
    exported, spider, tmp_path
):
    script = """
import sys, torch
class Nothing:
    def find_spec(self, name, *_):
        if name in ("spider_model", "tile_moe", "tokenizer", "spider", "data"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer("abc def", return_tensors="pt")
torch.save(model(**inputs).logits, sys.argv[2])
"""
    done = subprocess.run(
        [sys.executable, "-c", script, exported, tmp_path / "logits.pt"],
        check=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "torchao" not in done.stderr and "Failed to load" not in done.stderr
    with torch.no_grad():
        expected = spider(torch.tensor([list(b"abc def")]), n_loops=3).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_no_module_of_an_export_imports_what_windows_lacks():
    for name, content in MODULES.items():
        found = re.findall(
            r"^ *(?:import|from) (fcntl|grp|pwd|resource|termios)\b", content, re.MULTILINE
        )
        assert not found, name


@pytest.mark.slow
def test_an_export_writes_where_modules_of_unix_are_missing(exported, spider, tmp_path):
    script = """
import os, signal, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import GenerationMixin, PreTrainedModel, PreTrainedTokenizer
MISSING = {"fcntl", "grp", "pwd", "resource", "termios"}
class Nothing:
    def find_spec(self, name, *_):
        if name in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in MISSING:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Nothing())
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
    done = subprocess.run(
        [sys.executable, "-c", script, exported], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    prompt = list(b"abc def")
    expected = list(spider.generate(prompt, 9, temperature=0, n_loops=3))
    assert json.loads(done.stdout.splitlines()[-1])[len(prompt) :][: len(expected)] == expected


def test_what_is_saved_and_loaded_again_is_the_same_model(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, ids = loaded(tmp_path), text(1, 30)
    assert (
        torch.equal(model(ids).logits, again(ids).logits) and again.config.to_dict()["n_loops"] == 3
    )
    assert again.generation_config.suppress_tokens == model.generation_config.suppress_tokens
    assert loaded_tokenizer(tmp_path)("a<bos>é")["input_ids"] == tokenizer("a<bos>é")["input_ids"]
    assert all(
        torch.equal(weight, model.state_dict()[f"spider.{name}"])
        for name, weight in load_checkpoint(tmp_path)["model_state_dict"].items()
    )


def test_an_export_is_whole_or_not_there_and_takes_no_files_place(
    checkpoint, exported, tmp_path, monkeypatch, capsys
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    for name in (tmp_path / "full", tmp_path / "full" / "mine.txt", exported):
        line = refused([checkpoint, "--export", name], capsys, **BY_SAMPLE)
        assert "exists and is not an empty directory" in line
    assert "--export needs a checkpoint" in refused(
        [exported, "--export", tmp_path / "x"], capsys, **BY_SAMPLE
    )

    def fail(weights, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        for name in ("empty", "new"):
            line = refused([checkpoint, "--export", tmp_path / name], capsys, **BY_SAMPLE)
            assert f"{name} cannot be written: No space left on device" in line
    assert not list((tmp_path / "empty").iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "full"]
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "empty")]) == 0


@pytest.mark.parametrize("number", (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT))
def test_a_killed_export_leaves_nothing_or_what_the_next_one_deletes(
    checkpoint, tmp_path, processes, capsys, number
):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kept.txt").write_text("x")
    (tmp_path / ".out.abcdefgh").mkdir()  # others' directories and links
    (tmp_path / ".out.b.abcdefgh.unfinished-export").mkdir()
    (tmp_path / ".out.abcdefgh.unfinished-export").symlink_to("mine")
    others = {*os.listdir(tmp_path)}
    first = processes.Process(
        target=export_without_end, args=(str(checkpoint), str(tmp_path / "out")), daemon=True
    )
    first.start()
    until(lambda: [*tmp_path.glob(".out.*/export/model.safetensors")])
    line = refused([checkpoint, "--export", tmp_path / "out"], capsys, **BY_SAMPLE)
    assert f"{tmp_path}/out: another process is using it" in line
    os.kill(first.pid, number)
    first.join(LIMIT)
    assert first.exitcode == {signal.SIGKILL: -9, signal.SIGINT: 130}.get(number, 128 + number)
    assert ({*os.listdir(tmp_path)} == others) == (number != signal.SIGKILL)
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "out")]) == 0
    assert {*os.listdir(tmp_path)} == others | {"out"} and (tmp_path / "mine" / "kept.txt").exists()


def test_the_model_card_has_the_facts_and_what_others_wrote_as_json_alone(checkpoint, tmp_path):
    heading = "5\n\n# Not so <img src=x onerror=alert(1)>\n```\n\x1b[2J"
    state = torch.load(checkpoint)
    flags = {"data_dir": f"/home/me/{heading}", heading: heading, "seq_len": 48}
    torch.save(state | dict(flags=state["flags"] | flags), tmp_path / "spider-step6.pt")
    shutil.copy(checkpoint.parent / "metrics.jsonl", tmp_path)
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert sample.main([str(tmp_path / "spider-step6.pt"), "--export", str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    above, _, rest = card.partition("```json\n")
    block, _, below = rest.partition("\n```\n")
    facts = json.loads(block)
    assert facts["checkpoint"] == "spider-step6.pt" and facts["bytes_seen"] == state["bytes_seen"]
    assert (facts["val_bpb"], facts["val_bpb_at_step"]) == (line["val_bpb"], 6) and facts["flags"][
        "lr"
    ] == 0.01
    # names, no private paths
    assert facts["flags"][heading] == heading and facts["flags"]["data_dir"] == heading
    assert "Not so" not in above + below and card.isascii() and "\x1b" not in card
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training"].items() <= facts.items() and config["max_position_embeddings"] == 48


# --------------------------------------------------------------------------------------------------
# Flattening


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Lay out a project of modules: `pack__a` is pack/a.py."""
    monkeypatch.setattr(export, "ROOT", tmp_path)
    monkeypatch.setattr(export, "PROJECT", ("top", "pack", "other", "alone"))

    def lay(**modules: str):
        for name, content in modules.items():
            path = tmp_path / f"{name.replace('__', '/', 1)}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)

    return lay


def test_imports_are_followed_wherever_they_stand_and_those_of_others_stay(project):
    project(
        top="import os\nfrom pack.a import (x,\n                    y)\nfrom torch import nn\n",
        pack__a="if True:\n    from pack.b import z\ndef f():\n    from alone import w  # from "
        "alone import\n",
        pack__b="from pack.a import x  # a circle\nfrom alone import w; from pack.c import v\n",
        pack__c='TEXT = "from alone import nothing"\n',
        alone="",
        unused="",
    )
    assert flat_modules("top") == {
        "top.py": "import os\nfrom .a import (x,\n                    y)\nfrom torch import nn\n",
        "a.py": "if True:\n    from .b import z\ndef f():\n    from .alone import w  # from "
        "alone import\n",
        "b.py": "from .a import x  # a circle\nfrom .alone import w; from .c import v\n",
        "c.py": 'TEXT = "from alone import nothing"\n',
        "alone.py": "",
    }


@pytest.mark.parametrize(
    "line",
    (
        "import pack.a",
        "import alone",
        "import os, alone",
        "from pack import a",
        "from . import a",
        "from .a import x",
        "from pack.a import x; from other.a import y",
    ),
)
def test_an_import_that_no_flat_directory_can_have_is_an_error(project, line):
    project(top=line, pack__a="", other__a="", alone="")
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
    weights = torch.load(checkpoint)["model_state_dict"]
    argv = resuming(tmp_path, exported / file, "--reset_steps", "--lr", "1e-9", "--engram_lr", "0")
    assert command_line(argv) == 0
    state = final_state(tmp_path / "on")
    assert state["step"] == 2 and state["n_loops"] == 3 and state["recipe"] == "tiny"
    assert torch.equal(
        state["model_state_dict"]["engram_input.table.weight"], weights["engram_input.table.weight"]
    )
    for name, weight in weights.items():
        torch.testing.assert_close(state["model_state_dict"][name], weight, atol=5e-3, rtol=0)
    argv[argv.index("--max_steps") + 1] = "3"
    assert (
        command_line(
            [arg for arg in argv if arg not in ("--resume", str(exported / file), "--reset_steps")]
        )
        == 0
    )
    assert final_state(tmp_path / "on")["step"] == 3


def test_an_export_writes_and_is_measured_like_its_checkpoint(
    exported, checkpoint, tmp_path, capsys
):
    for name in (checkpoint, exported):
        assert sample.main([str(name), "--prompt", "abc", "--bytes", "20"]) == 0
    texts = capsys.readouterr().out
    assert texts[: len(texts) // 2] == texts[len(texts) // 2 :]
    (tmp_path / "text").write_bytes(b"abc def gh " * 20)
    origins = [checkpoint, exported, exported / "model.safetensors"]
    out, texts = tmp_path / "figures.json", [checkpoint.parent.parent / "data", tmp_path / "text"]
    assert sample.main([*map(str, origins), "--eval", *map(str, texts), "--json", str(out)]) == 0
    names = "file", "bytes", "bits_per_byte", "seq_len"
    figures = [tuple(one[name] for name in names) for one in json.loads(out.read_text())]
    assert figures[:2] == figures[2:4] == figures[4:] and [
        seq_len for *_, seq_len in figures[:2]
    ] == [32, 32]


def test_nothing_of_an_export_is_executed_or_read_but_config_and_weights(exported, tmp_path):
    directory, mark = shutil.copytree(exported, tmp_path / "copy"), tmp_path / "executed"
    for name in MODULES:
        (directory / name).write_text(f"open({str(mark)!r}, 'w')")
    for name in ("pytorch_model.bin", "model.pt", "spider-step9.pt"):
        (directory / name).write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR.")
    assert command_line(resuming(tmp_path, directory, "--reset_steps")) == 0 and load_checkpoint(
        directory
    )
    assert not mark.exists()


def test_weights_in_several_files_are_read_by_their_index(exported, model, tmp_path, capsys):
    directory = tmp_path / "shards"
    model.save_pretrained(directory, max_shard_size="200KB")
    index = directory / "model.safetensors.index.json"
    assert len([*directory.glob("model-*.safetensors")]) > 2
    one, many = (
        load_checkpoint(exported)["model_state_dict"],
        load_checkpoint(directory)["model_state_dict"],
    )
    assert one.keys() == many.keys() and all(
        torch.equal(weight, many[name]) for name, weight in one.items()
    )
    assert command_line(resuming(tmp_path, directory, "--reset_steps", "--max_steps", "1")) == 0
    for name in (
        "../shards/model-00001-of-00002.safetensors",
        str(exported / "model.safetensors"),
        "config.json",
        3,
    ):
        changed(
            index,
            lambda content, name=name: content["weight_map"].update({"spider.null_segment": name}),
        )
        capsys.readouterr()
        assert "can be read safely" in refused([directory, "--prompt", "a"], capsys, **BY_SAMPLE)


def changed(path: Path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def weights_changed(path: Path, change):
    weights = load_file(path)
    change(weights)
    save_file(weights, path)


def pipe(path: Path):
    path.unlink()
    os.mkfifo(path)


SPOILT = {
    "nested": lambda d: (d / "config.json").write_text("[" * 100_000),
    "a pipe for config": lambda d: pipe(d / "config.json"),
    "a pipe for weights": lambda d: pipe(d / "model.safetensors"),
    "many loops": lambda d: changed(d / "config.json", lambda c: c.update(n_loops=1 << 40)),
    "no loops": lambda d: changed(d / "config.json", lambda c: c.update(n_loops=0)),
    "odd size": lambda d: changed(
        d / "config.json", lambda c: c["spider"].update(hidden_size=1 << 40)
    ),
    "a step before 0": lambda d: changed(
        d / "config.json", lambda c: c["training"].update(step=-1)
    ),
    "a flag of another type": lambda d: changed(
        d / "config.json", lambda c: c["training"]["flags"].update(seq_len="32")
    ),
    "a length beyond bounds": lambda d: changed(
        d / "config.json", lambda c: c["training"]["flags"].update(eval_tokens=1 << 70)
    ),
    "a type that no model has": lambda d: weights_changed(
        d / "model.safetensors",
        lambda w: w.update({"spider.null_segment": w["spider.null_segment"].bool()}),
    ),
    "no JSON": lambda d: (d / "config.json").write_text("no JSON"),
    "a list": lambda d: (d / "config.json").write_text("[]"),
    "another model": lambda d: changed(d / "config.json", lambda c: c.pop("spider")),
    "foreign field": lambda d: changed(d / "config.json", lambda c: c["spider"].update(code="x")),
    "other size": lambda d: changed(
        d / "config.json", lambda c: c["spider"].update(hidden_size=48)
    ),
    "no training": lambda d: changed(d / "config.json", lambda c: c.update(training=3)),
    "cut off": lambda d: os.truncate(d / "model.safetensors", 9000),
    "no weights": lambda d: (d / "model.safetensors").unlink(),
    "a weight too few": lambda d: weights_changed(
        d / "model.safetensors", lambda w: w.pop("spider.null_segment")
    ),
    "a weight too many": lambda d: weights_changed(
        d / "model.safetensors", lambda w: w.update(more=torch.ones(2))
    ),
    "other shape": lambda d: weights_changed(
        d / "model.safetensors", lambda w: w.update({"spider.null_segment": torch.ones(33)})
    ),
}


@pytest.mark.parametrize("what", SPOILT)
def test_what_is_no_export_is_refused_in_a_line(exported, tmp_path, capsys, what):
    directory = shutil.copytree(exported, tmp_path / "copy")
    SPOILT[what](directory)
    assert str(directory) in refused(resuming(tmp_path, directory, "--reset_steps"), capsys)
