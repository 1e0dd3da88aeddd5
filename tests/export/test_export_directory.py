"""An export is whole, carries its code and looks for no module of ours elsewhere."""

import ast
import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import text
from exporting import MODULES, checkpoint, exported, loaded, loaded_tokenizer  # noqa: F401
from exporting import model, refusal, spider, tokenizer  # noqa: F401

import sample
from spider.export import directory
from spider.export.flatten import ROOT
from spider.training.checkpoint_loading import load_checkpoint


def test_an_export_carries_its_code_and_looks_for_no_module_of_ours_elsewhere(exported, model):
    assert {file.name for file in exported.iterdir()} == MODULES.keys() | {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json", "README.md", "LICENSE"}
    assert (exported / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert "\nlicense: apache-2.0\n" in (exported / "README.md").read_text().split("---")[1]
    assert len({file.stat().st_mode for file in exported.iterdir()}) == 1
    for name in MODULES:
        code, [source] = (exported / name).read_text(), [*ROOT.glob(name), *ROOT.glob(f"spider/**/{name}")]
        assert re.sub("from [.]", "from ", code) == re.sub(
            "from spider[.](?:[a-z_]+[.])*(?=[a-z_]+ import)", "from ", source.read_text())
        imported = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                    for node in ast.walk(ast.parse(code)) if isinstance(node, (ast.Import, ast.ImportFrom))
                    and not getattr(node, "level", 0)}
        roots = {name.partition(".")[0] for name in imported}
        assert roots <= sys.stdlib_module_names | {"torch", "transformers", "torchao", "tile_kernels", "tilelang"}, name
    assert type(model).__module__.startswith("transformers_modules.")
    assert type(model.spider).__module__ == type(model).__module__.replace("modeling_spider", "spider_model")


@pytest.mark.slow
def test_an_export_works_where_spider_is_not_installed(exported, spider, tmp_path):
    script = """
import sys, torch
class Nothing:
    def find_spec(self, name, *_):
        if name in ("spider_model", "tile_moe", "tokenizer", "spider", "data"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
inputs = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)("abc def", return_tensors="pt")
torch.save(model(**inputs).logits, sys.argv[2])
"""
    subprocess.run([sys.executable, "-c", script, exported, tmp_path / "logits.pt"], check=True, cwd=tmp_path)
    with torch.no_grad():
        expected = spider(torch.tensor([list(b"abc def")]), n_loops=3).logits
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_weights_in_several_files_are_the_same_weights(checkpoint, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "SHARD_BYTES", 60_000)
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "shards")]) == 0
    names = [file.name for file in (tmp_path / "shards").glob("*.safetensors")]
    assert len(names) > 2 and f"model-00001-of-{len(names):05}.safetensors" in names
    whole, parts = (loaded(directory).state_dict() for directory in (exported, tmp_path / "shards"))
    back = load_checkpoint(tmp_path / "shards")["model_state_dict"]
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    assert all(torch.equal(weight, back[name.removeprefix("spider.")]) for name, weight in whole.items())


def test_what_is_saved_and_loaded_again_is_the_same_model(exported, model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path / "again")
    tokenizer.save_pretrained(tmp_path / "again")
    again, ids = loaded(tmp_path / "again"), text(1, 30)
    assert torch.equal(model(ids).logits, again(ids).logits) and again.config.to_dict()["n_loops"] == 3
    for name in (*MODULES, "generation_config.json"):
        assert (tmp_path / "again" / name).exists(), name
    assert again.generation_config.suppress_tokens == model.generation_config.suppress_tokens
    back = load_checkpoint(tmp_path / "again")
    assert all(torch.equal(weight, model.state_dict()[f"spider.{name}"])
               for name, weight in back["model_state_dict"].items())
    once_more = loaded_tokenizer(tmp_path / "again")
    assert once_more("a<bos>é")["input_ids"] == tokenizer("a<bos>é")["input_ids"]


def test_an_export_is_whole_or_not_there_and_takes_no_files_place(checkpoint, exported, tmp_path, monkeypatch, capsys):
    def to(directory):
        return refusal(capsys, [checkpoint, "--export", directory], sample.main)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    os.symlink("nowhere", tmp_path / "link")
    for name in ("full", "file"):
        assert f"{name} exists and is not an empty directory: use another name" in to(tmp_path / name)
    assert "exists and is not an empty" in to(exported) and "below cannot be written" in to(tmp_path / "file" / "below")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine.txt"]

    def fail(library, directory, weights):
        (directory / "model.safetensors").write_bytes(b"half")
        raise library.SafetensorError("No space left on device")
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(directory, "write_weights", fail)
        for name in ("empty", "new"):
            assert f"{name} cannot be written: No space left on device" in to(tmp_path / name)
    assert not list((tmp_path / "empty").iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["empty", "file", "full", "link"]
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "empty")]) == 0
    assert sample.main([str(checkpoint), "--export", str(tmp_path / "link")]) == 0
    assert (tmp_path / "nowhere" / "config.json").exists()

