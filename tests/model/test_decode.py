"""Decoding step by step equals the full pass at every byte; generation samples from its logits."""

import math
import pickle
import threading

import pytest
import torch

from conftest import awake, documents, small_config, text
from spider.model.decode import PIECE, draw
from spider.model.memory import SegmentEngram
from spider_model import Spider
from table import EVERY_VARIANT_IN_TIME
from tokenizer import BOS_ID, EOS_ID, PAD_ID

LOOPS = 5  # more than the models' n_loops=3


def halting_model(**changes) -> Spider:
    """Make a model in evaluation mode whose segments halt after different numbers of loops."""
    model = awake(small_config(**(dict(n_loops=3) | changes)), dtype=torch.float64).eval()
    if model.core is not None and model.core.halt_predictor is not None:
        with torch.no_grad():
            model.core.halt_predictor.weight.mul_(100)
            model.core.halt_predictor.bias.fill_(0.5)
    return model


def sequences_of_documents() -> torch.Tensor:
    """Return three sequences [3, 48] whose documents and segments end at different bytes: BOS
    without EOS, EOS without BOS, PAD, spaces."""
    sequences = torch.cat((documents(48), documents(11, 2, 30, 5, seed=1), text(1, 48, seed=2)))
    sequences[0, 1::5] = ord(" ")
    sequences[0, :30:10] = ord("\n")
    sequences[2, 9] = EOS_ID
    sequences[2, 20] = BOS_ID
    sequences[2, 33:36] = PAD_ID
    return sequences


def step_logits(model: Spider, sequences: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Feed sequences in steps that end before the bytes `ends`; return the logits of all bytes."""
    state = model.decoding_state(len(sequences), LOOPS)
    return torch.cat([model.step(ids, state) for ids in sequences.tensor_split(ends, dim=1)], dim=1)


@torch.no_grad()
def full_pass(model: Spider, sequences: torch.Tensor):
    return model(sequences, n_loops=LOOPS)


def assert_equal(ours: torch.Tensor, expected: torch.Tensor):
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


@EVERY_VARIANT_IN_TIME
def test_steps_equal_the_full_pass_at_every_byte(changes):
    model = halting_model(**changes)
    sequences = sequences_of_documents()
    full = full_pass(model, sequences)
    for ends in ([], [*range(1, 20), 26, 35, *range(36, 48)]):
        assert_equal(step_logits(model, sequences, ends), full.logits)
    if model.core is not None and model.config.act:
        assert 1.1 < full.mean_loops < 4.5


def test_long_prompt_is_read_in_pieces():
    model = halting_model()
    prompt = text(2, PIECE + 30)
    assert_equal(step_logits(model, prompt, [20]), full_pass(model, prompt).logits)


def test_cache_grows_by_doubling_and_shrinks_at_a_new_document():
    model = halting_model()
    row = torch.cat((documents(150), documents(70, seed=1)), dim=1)
    with torch.no_grad():
        full = model(row).logits
    state = model.decoding_state()
    slots = []
    for t in range(220):
        assert_equal(model.step(row[:, t : t + 1], state)[:, 0], full[:, t])
        slots.append(state.byte_latents.shape[3])
    for t, count in enumerate(slots[:150]):
        assert t + 1 <= count <= max(16, 2 * t + 2)
    assert len(set(slots[:150])) < 8  # the cache is seldom copied
    assert slots[-1] < slots[149]
    farthest = (SegmentEngram.kernel_size - 1) * len(model.config.engram_contexts)
    assert state.convolved.shape[3] <= 2 * max(16, farthest + 1)
    # only latents are kept: kv_lora_rank + qk_rope_head_dim
    assert state.byte_latents.shape[-1] == state.segment_latents.shape[-1] == 16 + 8


def test_core_runs_only_for_ended_segments_and_only_their_loops():
    model = halting_model(boundaries="words")
    sequences = torch.full((3, 5), ord("x"))
    sequences[1, 2] = sequences[2, 2] = sequences[2, 4] = ord(" ")
    segments = []  # per visit of the first layer
    model.core.layers[0].register_forward_pre_hook(
        lambda module, args: segments.append(len(args[0]))
    )
    # segments halt in the second loop, and run a third
    model.core.halt = lambda h: h.new_full((len(h),), 0.6)
    step_logits(model, sequences, [1, 2, 3, 4])
    assert segments == [2] * 3 + [1] * 3
    segments.clear()
    step_logits(model, sequences, [])
    assert segments == [3] * 3  # all segments of a prompt at once


def test_copied_reordered_and_pickled_states_continue_independently():
    model = halting_model()
    sequences = sequences_of_documents()
    full = full_pass(model, sequences).logits
    state = model.decoding_state(3, LOOPS)
    model.step(sequences[:, :29], state)
    copied = state.copy()
    picked = state.copy([2, 0, 0])
    loaded = pickle.loads(pickle.dumps(state))
    model.step(text(3, 15, seed=8), copied)  # must not change the other states
    assert_equal(model.step(sequences[[2, 0, 0], 29:], picked), full[[2, 0, 0], 29:])
    assert_equal(model.step(sequences[:, 29:], state), full[:, 29:])
    assert_equal(model.step(sequences[:, 29:], loaded), full[:, 29:])


def test_weights_with_other_hashes_can_be_loaded_between_steps():
    model = halting_model()
    sequences = sequences_of_documents()
    step_logits(model, sequences, [])
    state = model.decoding_state(3, LOOPS)
    with torch.no_grad():
        other = {
            name: t if t.is_floating_point() else t * 3 for name, t in model.state_dict().items()
        }
    model.load_state_dict(other)
    assert_equal(model.step(sequences, state), full_pass(model, sequences).logits)


def test_small_step_uses_one_thread_and_restores_the_thread_count(monkeypatch):
    model = halting_model()  # of width 32
    monkeypatch.setattr("spider.model.decode.ONE_THREAD", 4 * 32**2)
    threads = [3]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    taken = []
    model.lm_head.register_forward_pre_hook(lambda *_: taken.append(threads[-1]))
    for sequences, length in ((2, 2), (1, 5), (4, 1)):
        model.step(text(sequences, length), model.decoding_state(sequences))
    assert taken == [1, 3, 1]
    monkeypatch.setattr(model, "after_core", None)
    with pytest.raises(TypeError):
        model.step(text(1, 1), model.decoding_state())
    assert threads[-2:] == [1, 3]


def test_concurrent_small_steps_restore_the_thread_count():
    """torch starts a Python thread with the count that any thread set last."""
    model = halting_model()
    numbers = []

    def run(function):
        thread = threading.Thread(target=function)
        thread.start()
        thread.join()

    def decode(*_):
        numbers.append(torch.get_num_threads())
        model.step(text(1, 1), model.decoding_state())

    hook = model.lm_head.register_forward_pre_hook(lambda *_: hook.remove() or run(decode))
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model.step(text(1, 1), model.decoding_state())
        run(lambda: numbers.append(torch.get_num_threads()))
    finally:
        torch.set_num_threads(before)
    assert numbers == [1, 3]


def test_decoding_in_training_mode_is_refused():
    model = awake(small_config())
    with pytest.raises(RuntimeError, match="evaluation mode"):
        model.step(text(1, 3), model.decoding_state())


def samples(model: Spider, sequences: int, count: int, **options) -> list[tuple]:
    """Continue one prompt several times; return the bytes of each sample, [sequences][count]."""
    state = model.decoding_state()
    logits = model.step(torch.tensor([[BOS_ID, 65]]), state)[:, -1].expand(sequences, -1)
    steps = model.generate_batch(logits, state.copy([0] * sequences), count, **options)
    return list(zip(*steps, strict=True))


def test_samples_depend_only_on_the_generator_and_end_independently():
    model = halting_model()
    with torch.no_grad():  # EOS becomes about as likely as a letter
        mean_of_letters = model.lm_head.weight[32:127].mean(0)
        model.lm_head.weight[EOS_ID] = mean_of_letters + 0.3 * torch.randn(32).double()
    first, again = (
        samples(model, 4, 60, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    )
    assert first == again
    assert len(set(first)) == 4
    lengths = [sum(byte is not None for byte in row) for row in first]
    assert len(set(lengths)) > 1
    for row, length in zip(first, lengths, strict=True):
        assert all(0 <= byte < 256 for byte in row[:length])
        assert set(row[length:]) <= {None}


def test_draws_follow_temperature_top_k_and_top_p_and_skip_special_ids():
    logits = torch.full((4000, 272), -50.0)
    logits[:, [65, 66, 67, EOS_ID]] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    logits[:, [PAD_ID, BOS_ID, 265]] = 10.0
    before = logits.clone()

    def frequencies(temperature=1.0, top_k=None, top_p=None):
        """Return the frequency of each id among 4000 draws."""
        ids = draw(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return {int(i): float((ids == i).float().mean()) for i in ids.unique()}

    for only_the_likeliest in (
        frequencies(temperature=0),
        frequencies(temperature=1e-300),
        frequencies(top_k=1),
        frequencies(top_p=1e-50),
        frequencies(top_k=2, top_p=0.6),
    ):
        assert only_the_likeliest == {65: 1.0}
    for all_ids in (frequencies(), frequencies(top_k=999)):
        assert all_ids.keys() == {65, 66, 67, EOS_ID}
        assert abs(all_ids[66] - 0.3) < 0.03
    for two in (frequencies(top_k=2), frequencies(top_p=0.7)):
        assert two.keys() == {65, 66}
    squares = 0.25 + 0.09 + 0.0225 + 0.0025
    assert abs(frequencies(temperature=0.5)[65] - 0.25 / squares) < 0.03
    assert torch.equal(logits, before)
    logits[:, : EOS_ID + 1] = -math.inf
    logits[:, 65:67] = 0.0
    assert len(frequencies(top_p=0.5)) == 1  # of two equally likely ids
