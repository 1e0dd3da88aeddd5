"""An export is complete, with its code and facts; train.py and sample.py read it without trusting
it."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import sample
from conftest import ROOT, final_state, refused, run_python, text
from exporting import checkpoint, exported, load_model, model, spider
from spider.files import locked
from spider.inference.export import flat_modules
from spider.training.checkpoint import load_checkpoint
from train import command_line

MODULES = flat_modules("spider.inference.modeling_spider")


def resuming(tmp_path, origin, *flags) -> list[str]:
    """Return the command line of a two-step run that starts from an export."""
    settings = "--mock_data --seq_len 32 --micro_batch 2 --max_steps 2 --eval_every 0 --device cpu"
    paths = ["--ckpt_dir", str(tmp_path / "resumed"), "--resume", str(origin)]
    return settings.split() + paths + list(flags)


def refusal(capsys, *argv) -> str:
    """Run sample.py, which must fail; return its error."""
    return refused(argv, capsys, program="sample.py", main=sample.main)


# --------------------------------------------------------------------------------------------------
# Writing


def test_export_has_config_weights_tokenizer_card_license_and_code(exported):
    assert {file.name for file in exported.iterdir()} == MODULES.keys() | {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
        "LICENSE",
    }
    for name, code in MODULES.items():
        assert (exported / name).read_text() == code
        assert not re.search(r"^ *(from|import) (spider|spider_model|tile_moe)\b", code, re.M)
    assert (exported / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "\nlicense: apache-2.0\n" in (exported / "README.md").read_text().split("---")[1]
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1  # no file is private


OURS = ["spider_model", "tile_moe", "tokenizer", "spider", "data"]
UNIX_ONLY = ["fcntl", "grp", "pwd", "resource", "termios"]
ALONE = """
import os, signal, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
windows = sys.argv[2] == "fcntl"
if windows:
    from transformers import GenerationMixin, PreTrainedModel  # before Linux is hidden
    for name in ("SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1"):
        delattr(signal, name)
    for name in ("fork", "geteuid", "getuid", "sysconf", "O_NOFOLLOW"):
        delattr(os, name)
    sys.platform = "win32"
class Missing:
    def find_spec(self, name, *_):
        if name in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
for name in sys.argv[2:]:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Missing())
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=False)
assert not any(name.startswith("transformers_modules") for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = tokenizer("abc def", return_tensors="pt")
print(model.generate(**inputs, max_new_tokens=9, do_sample=False)[0].tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize("missing", (OURS, UNIX_ONLY), ids=("project", "unix"))
def test_export_works_without_the_project_and_without_unix_modules(
    exported, spider, tmp_path, missing
):
    done = run_python(ALONE, exported, *missing, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if missing is OURS:
        assert "torchao" not in done.stderr  # torchao warns of kernels that fail to load
    prompt = list(b"abc def")
    written = json.loads(done.stdout.splitlines()[-1])[len(prompt) :]
    expected = list(spider.generate(prompt, 9, temperature=0, n_loops=3))
    assert written[: len(expected)] == expected


def test_exporting_an_export_is_refused(exported, tmp_path, capsys):
    line = refusal(capsys, exported, "--export", tmp_path / "new")
    assert "--export needs a checkpoint of a training run" in line
    assert not os.listdir(tmp_path)


def test_failed_export_leaves_no_files_and_can_be_repeated(
    checkpoint, tmp_path, monkeypatch, capsys
):
    written = []

    def fail(weights, path, metadata):
        written.append(path)
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    argv = [str(checkpoint), "--export", str(tmp_path / "new")]
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", fail)
        assert "new cannot be written: No space left on device" in refusal(capsys, *argv)
    assert not os.listdir(tmp_path)

    left = written[0].parent  # a killed process would leave it
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    with locked(tmp_path / "new", tmp_path / ".new.lock"):
        assert "another command is using it" in refusal(capsys, *argv)
        assert os.listdir(left)
    assert sample.main(argv) == 0
    assert os.listdir(tmp_path) == ["new"]


def test_model_card_has_facts_and_untrusted_text_only_as_json(checkpoint, tmp_path, capsys):
    heading = "5\n\n# Not so <img src=x onerror=alert(1)>\n```\n\x1b[2J"
    saved = torch.load(checkpoint)
    saved["flags"] |= {"data_dir": f"/home/me/{heading}/", heading: heading}
    saved["exploded"] = True
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
    assert facts["bytes_seen"] == saved["bytes_seen"]
    assert facts["val_bpb"] == last_step["val_bpb"] and facts["val_bpb_at_step"] == 6
    assert facts["flags"][heading] == heading
    assert facts["flags"]["data_dir"] == heading  # the name only, since paths are private
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["training"].items() <= facts.items()


# --------------------------------------------------------------------------------------------------
# Reading back


def test_run_starts_from_the_weights_of_an_export(exported, checkpoint, tmp_path, capsys):
    line = refused(resuming(tmp_path, exported), capsys)
    assert "add --reset_steps" in line  # an export has no optimizer state
    unchanging = "--reset_steps --lr 1e-9 --engram_lr 0".split()
    assert command_line(resuming(tmp_path, exported, *unchanging)) == 0
    saved = final_state(tmp_path / "resumed")
    assert saved["step"] == 2 and saved["n_loops"] == 3 and saved["recipe"] == "tiny"
    for name, weight in torch.load(checkpoint)["model_state_dict"].items():
        torch.testing.assert_close(saved["model_state_dict"][name], weight, atol=5e-3, rtol=0)


def test_eval_scores_an_export_like_its_checkpoint(exported, checkpoint, tmp_path, figures):
    (tmp_path / "text").write_bytes(b"abc def gh " * 20)
    texts = (checkpoint.parent.parent / "data", tmp_path / "text")
    origins = (checkpoint, exported, exported / "model.safetensors")
    found = figures(*origins, "--eval", *texts)
    for figure in found:
        del figure["checkpoint"]
        assert (figure["seq_len"], figure["n_loops"]) == (32, 3)
    assert found[:2] == found[2:4] == found[4:]


def test_loading_an_export_executes_none_of_its_files(exported, tmp_path):
    directory = shutil.copytree(exported, tmp_path / "copy")
    mark = tmp_path / "executed"
    for name in MODULES:
        (directory / name).write_text(f"open({str(mark)!r}, 'w')")
    for name in ("pytorch_model.bin", "spider-step9.pt"):
        (directory / name).write_bytes(b"cposix\nsystem\n(S'touch " + os.fsencode(mark) + b"'\ntR.")
    assert command_line(resuming(tmp_path, directory, "--reset_steps")) == 0
    assert not mark.exists()


@pytest.fixture
def saved_again(model, tmp_path) -> Path:
    """Save an export with transformers, with the weights in several files."""
    directory = tmp_path / "shards"
    model.save_pretrained(directory, max_shard_size="200KB")
    assert len([*directory.glob("model-*.safetensors")]) > 2
    return directory


def test_model_saved_by_transformers_loads_there_and_here(exported, model, saved_again):
    again = load_model(saved_again)
    ids = text(1, 30)
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert again.generation_config.suppress_tokens == model.generation_config.suppress_tokens
    one = load_checkpoint(exported)["model_state_dict"]
    several = load_checkpoint(saved_again)["model_state_dict"]
    assert one.keys() == several.keys()
    for name, weight in one.items():
        assert torch.equal(weight, several[name]), name


def test_index_with_a_path_outside_the_export_is_refused(saved_again, capsys):
    index = saved_again / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["spider.null_segment"] = "../shards/model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "can be read safely" in refusal(capsys, saved_again, "--prompt", "a")


def test_damaged_export_is_refused_in_one_line(exported, tmp_path, capsys):
    directory = shutil.copytree(exported, tmp_path / "copy")
    config = directory / "config.json"
    argv = resuming(tmp_path, directory, "--reset_steps")
    good = config.read_text()
    for bad in ("[]", good.replace('"hidden_size": 32', '"hidden_size": 48')):
        config.write_text(bad)
        assert str(directory) in refused(argv, capsys)
    config.write_text(good)
    os.truncate(directory / "model.safetensors", 900)
    assert str(directory) in refused(argv, capsys)
