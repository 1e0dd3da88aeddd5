"""What a run would take: memory, the layers that are recomputed for it, a rate."""

import math
import weakref

import pytest
import torch
from conftest import final_state, run, run_flags, text
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import cost
import train
from spider_model import RECOMPUTE
from train import Batch, parse_args

class Live(TorchDispatchMode):
    """Bytes of the tensors made inside it that are alive, and the most there were."""
    live = peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        given, made = ({t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor)}
                       for tree in ((args, kwargs), out))
        for storage in made - given:
            self.live += storage.nbytes()
            weakref.finalize(storage, self.end, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def end(self, size: int):
        self.live -= size


@pytest.mark.parametrize("precision", ("fp32", "bf16"))
@pytest.mark.parametrize("lengths", ((256,), (129, 127)), ids=("whole rows", "halves"))
@pytest.mark.parametrize("flags", (("--recompute", "all"), ("--recompute", "core"),
                                   ("--recompute", "nothing", "--grad_accum", "2")), ids=("least", "less", "more"))
def test_the_memory_that_is_estimated_bounds_what_a_step_takes_whatever_its_documents(lengths, flags, precision):
    """Halves are the worst case, if one row is whole: all of them are filled up to its length."""
    args = parse_args(["--model", "tiny", "--seq_len", "256", "--micro_batch", "8", "--device", "cpu", *flags])
    train.take_recipe(args, torch.device("cpu"))
    with torch.device("meta"):
        model = train.Spider(train.model_config(args))
    said = cost.estimate_memory(model, 2, args, "muon", precision, torch.device("cpu"), args.recompute)
    train.make_real(model, torch.device("cpu"), precision, "grouped", args)
    ids = text(8, 256)
    ends = torch.tensor(lengths * (256 // sum(lengths))).cumsum(0)
    ids[1:, ends - 1] = train.tokenizer.EOS_ID
    with Live() as memory:
        train.accumulate(model, [Batch.of(ids, ids, 0)] * args.grad_accum, 2)
    estimated = sum(said.values()) - said["parameters"] - said["optimizer"]
    assert memory.peak < estimated < 2 * memory.peak


def test_auto_recomputes_the_least_that_fits_with_room_to_spare_and_all_where_nothing_does():
    needs = dict(nothing=dict(a=50.0, b=10.0), core=dict(a=30.0, b=10.0), all=dict(a=20.0, b=5.0))
    for there, chosen in ((70, "nothing"), (61, "core"), (45, "core"), (44, "all"), (5, "all")):
        assert cost.choose_recompute("auto", needs.get, there) == (chosen, sum(needs[chosen].values()))
    assert cost.choose_recompute("core", needs.get, 5) == ("core", 40.0)


def estimated(recompute: str, *flags, precision="bf16") -> float:
    """GB of a step of 1b on a GPU."""
    args = parse_args(["--model", "1b", "--seq_len", "256", "--micro_batch", "112", *flags], environ={})
    train.take_recipe(args, torch.device("cuda"))
    with torch.device("meta"):
        model = train.Spider(train.model_config(args))
    return sum(cost.estimate_memory(model, args.n_loops, args, "muon", precision, torch.device("cuda"),
                                    recompute).values()) / 1e9


def test_what_is_recomputed_takes_less_memory_and_other_rows_more():
    nothing, core, everything = (estimated(recompute) for recompute in RECOMPUTE)
    assert everything < 0.8 * core and core < 0.6 * nothing
    assert estimated("core", "--grad_accum", "4") > core + 3 and estimated("core", precision="fp8") > core
    assert estimated("core", "--seq_len", "2048", "--micro_batch", "64") > 2.5 * core


def test_the_flag_of_the_original_is_recompute_nothing_and_what_is_chosen_is_one_line(tmp_path, shards, capsys):
    assert parse_args(["--no_gradient_checkpointing"]).recompute == "nothing" and parse_args([]).recompute == "auto"
    with pytest.raises(train.UsageError, match="--no_gradient_checkpointing: it is --recompute nothing, and"):
        parse_args(["--no_gradient_checkpointing", "--recompute", "all"])
    states = []
    for flags, said in (((), "recompute nothing, a step takes about"), (("--recompute", "all"), "recompute all,")):
        states.append(final_state(run(tmp_path, shards, *flags, steps=2, ckpt="run" + "".join(flags))))
        lines = [line for line in capsys.readouterr().err.splitlines() if said in line]
        assert len(lines) == 1 and ("(auto)" in lines[0]) == (not flags)
    for name, value in states[0]["model_state_dict"].items():
        torch.testing.assert_close(states[1]["model_state_dict"][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_step_that_a_cpu_cannot_hold_is_refused_before_it_is_tried(tmp_path, shards, capsys):
    argv = run_flags(shards, tmp_path / "run", "--micro_batch", str(1 << 20), "--seq_len", "600")
    assert train.command_line([*argv, "--recompute", "auto"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert "--micro_batch: a step takes about" in err[-1] and any("recompute all" in line and "NOT ENOUGH" in line
                                                                  for line in err)


@pytest.mark.parametrize("lines", ("", "[" * 200_000, '{"tok_per_sec": 0}', '{"tok_per_sec": 1e-320}', '{"a": 1}', "3"))
def test_a_rate_that_no_run_had_is_not_gone_by(tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_text(lines)
    args = parse_args(["--ckpt_dir", str(tmp_path)])
    rate, origin = cost.expected_rate(args, torch.device("cpu"), 1e6)
    assert 0 < rate < math.inf and origin.startswith("estimated")
