"""Decoding step by step equals the full pass at every byte, and generation writes what decoding
predicts."""

import random

import pytest
import torch

from conftest import awake, documents, small_config, text
from spider import decode
from spider.decode import DecodingState, draw
from spider.memory import SegmentEngram
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID
from variants import VARIANTS

LOOPS = 5  # more than the three that the models here are trained for


def halting_model(**changes) -> Spider:
    """Make a model in evaluation mode whose segments halt after different numbers of loops."""
    model = awake(small_config(**(dict(n_loops=3) | changes)), dtype=torch.float64).eval()
    if model.core is not None and model.core.halt_predictor is not None:
        with torch.no_grad():
            model.core.halt_predictor.weight.mul_(100)
            model.core.halt_predictor.bias.fill_(0.5)
    return model


def rows_of_documents() -> torch.Tensor:
    """Return three rows [3, 48] whose documents and segments end at different bytes: BOS without
    EOS, EOS without BOS, PAD, spaces."""
    rows = torch.cat((documents(48), documents(11, 2, 30, 5, seed=1), text(1, 48, seed=2)))
    rows[0, 1::5] = ord(" ")
    rows[2, 9], rows[2, 20], rows[2, 33:36] = EOS_ID, BOS_ID, PAD_ID
    return rows


def fed(model: Spider, rows: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Return the logits of rows that are fed in parts, which end at `ends`."""
    state = model.decoding_state(len(rows), LOOPS)
    return torch.cat([model.step(part, state) for part in rows.tensor_split(ends, dim=1)], dim=1)


def check_steps(model: Spider, rows: torch.Tensor, ends: list[int]):
    """Check that bytes fed in parts give the logits of the full pass; return its output."""
    with torch.no_grad():
        full = model(rows, n_loops=LOOPS)
        torch.testing.assert_close(fed(model, rows, ends), full.logits, rtol=0, atol=1e-9)
    return full


FAST = (
    "everything",
    "segment offsets",
    "learned boundaries",
    "no core",
    "no halting",
    "two segment engrams",
    "no matches",
    "matches by words alone",
    "no engram",
    "no coda",
    "byte window",
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=() if name in FAST else pytest.mark.slow)
        for name, changes in VARIANTS.items()
    ],
)
def test_steps_equal_the_full_pass_at_every_byte(changes):
    model, rows, numbers = (
        halting_model(**changes),
        rows_of_documents(),
        random.Random(len(changes)),
    )
    for ends in ([], list(range(1, 48)), sorted(numbers.sample(range(1, 48), 6))):
        out = check_steps(model, rows, ends)
    if model.core is not None and model.config.act:
        assert 1.1 < out.mean_loops < 4.5


def test_a_prompt_longer_than_a_pass_is_read_in_several(monkeypatch):
    monkeypatch.setattr(decode, "PIECE", 7)
    check_steps(halting_model(), rows_of_documents(), [23])


def test_a_long_text_doubles_the_cache_slots_and_a_new_document_frees_them():
    model, row = halting_model(), torch.cat((documents(150), documents(70, seed=1)), dim=1)
    with torch.no_grad():
        full, state, slots = model(row).logits, model.decoding_state(), []
        for t in range(220):
            torch.testing.assert_close(
                model.step(row[:, t : t + 1], state)[:, 0], full[:, t], rtol=0, atol=1e-9
            )
            slots.append(state.byte_latents.shape[3])
    assert all(t + 1 <= n <= max(16, 2 * t + 2) for t, n in enumerate(slots[:150]))
    assert len(set(slots[:150])) < 8 and slots[-1] < slots[149]  # moved seldom
    assert state.convolved.shape[3] <= 2 * max(
        16, SegmentEngram.tap_distances(model.config)[-1] + 1
    )
    # only latents are kept
    assert state.byte_latents.shape[-1] == state.segment_latents.shape[-1] == 16 + 8


def test_the_core_runs_only_for_rows_in_which_a_segment_ends_and_for_its_loops():
    model, rows, visits = halting_model(boundaries="words"), torch.full((3, 5), ord("x")), []
    rows[1, 2] = rows[2, 2] = rows[2, 4] = ord(" ")
    model.core.layers[0].register_forward_pre_hook(lambda module, args: visits.append(len(args[0])))
    # halts in the second loop, and is computed in a third
    model.core.halt = lambda h: h.new_full((len(h),), 0.6)
    fed(model, rows, [1, 2, 3, 4])
    assert visits == [2] * 3 + [1] * 3
    visits.clear()
    fed(model, rows, [])
    assert visits == [3] * 3  # all segments of a prompt together


def test_copied_picked_and_saved_states_continue_independently(tmp_path):
    model, rows = halting_model(), rows_of_documents()
    with torch.no_grad():
        full = model(rows, n_loops=LOOPS).logits
        state = model.decoding_state(3, LOOPS)
        model.step(rows[:, :29], state)
        other, picked = state.copy(), state.copy([2, 0, 0])
        torch.save(vars(state.copy()), tmp_path / "state.pt")
        loaded = DecodingState(**torch.load(tmp_path / "state.pt", weights_only=True))
        model.step(text(3, 15, seed=8), other)
        for continued, chosen in ((picked, [2, 0, 0]), (state, [0, 1, 2]), (loaded, [0, 1, 2])):
            torch.testing.assert_close(
                model.step(rows[chosen, 29:], continued), full[chosen, 29:], rtol=0, atol=1e-9
            )


def test_a_model_in_training_mode_refuses_to_decode():
    model = awake(small_config())
    with pytest.raises(RuntimeError, match="evaluation mode"):
        model.step(text(1, 3), model.decoding_state())


def test_samples_of_one_prompt_differ_by_the_generator_alone_and_end_apart():
    model = halting_model()
    with torch.no_grad():
        model.lm_head.weight[EOS_ID] = (
            model.lm_head.weight[32:127].mean(0) + 0.3 * torch.randn(32).double()
        )
    state = model.decoding_state()
    logits = model.step(torch.tensor([[BOS_ID, 65]]), state)[:, -1]

    def samples(rows, count, **options):
        return list(
            model.generate_batch(logits.expand(rows, -1), state.copy([0] * rows), count, **options)
        )

    runs = [samples(4, 60, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    columns = list(zip(*runs[0], strict=True))
    lengths = [sum(byte is not None for byte in column) for column in columns]
    assert runs[0] == runs[1] and len(set(columns)) == 4 and len(set(lengths)) > 1
    for column, length in zip(columns, lengths, strict=True):
        assert all(0 <= byte < 256 for byte in column[:length]) and set(column[length:]) <= {None}
    assert samples(3, 12, temperature=0) == [
        [byte] * 3 for (byte,) in samples(1, 12, temperature=0)
    ]


def test_draws_follow_temperature_top_k_and_top_p_and_never_take_a_sentinel():
    logits = torch.full((4000, 272), -50.0)
    logits[:, [65, 66, 67, EOS_ID]] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    logits[:, [PAD_ID, BOS_ID, 265]] = 10.0
    before = logits.clone()

    def drawn(temperature=1.0, top_k=None, top_p=None):
        ids = draw(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return {int(i): float((ids == i).float().mean()) for i in ids.unique()}

    assert drawn(0) == {65: 1.0} and drawn(top_k=1) == {65: 1.0} and drawn(top_p=0.4) == {65: 1.0}
    assert drawn().keys() == {65, 66, 67, EOS_ID} and abs(drawn()[66] - 0.3) < 0.03
    for found in (drawn(top_k=2), drawn(top_p=0.7)):
        assert found.keys() == {65, 66} and abs(found[65] - 0.5 / 0.8) < 0.03
    assert drawn(top_p=0.81).keys() == {65, 66, 67} and drawn(top_k=999).keys() == drawn().keys()
    assert abs(drawn(temperature=0.5)[65] - 0.25 / (0.25 + 0.09 + 0.0225 + 0.0025)) < 0.03
    assert torch.equal(logits, before)
