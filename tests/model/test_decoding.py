"""Decoding step by step equals the full pass at every byte; each point also seen failing on a planted fault."""

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spider_model
from conftest import awake, documents, small_config, text
from spider.model import decoding, segments
from spider.model.cache import Cache
from spider.model.decoding import DecodingState, draw
from spider.model.engram import SegmentEngram
from spider.model.match_memory import MatchMemory
from spider.model.packing import Packing
from spider_model import Spider
from tokenizer import BOS_ID, EOS_ID, PAD_ID

CUTS = {
    "nothing": {}, "whitespace": dict(boundaries="whitespace"), "every third": dict(boundaries="every_third"),
    "every byte": dict(boundaries="every_byte"), "words": dict(boundaries="words"), "places": dict(places=3),
    "learned": dict(boundaries="learned"),
    "places in words": dict(places=4, boundaries="words"), "core": dict(n_recurrent_layers=0), "act": dict(act=False),
    "segment engram": dict(engram_layers=()), "two segment engrams": dict(n_recurrent_layers=3, engram_layers=(2, 0)),
    "byte engram": dict(engram_byte_orders=()), "matches": dict(engram_match_orders=()),
    "since words": dict(engram_match_words=(1, 2)),
    "since words alone": dict(engram_byte_orders=(), engram_match_orders=(), engram_match_words=(1, 3)),
    "votes": dict(engram_votes=3), "logits": dict(engram_logits=True),
    "votes, logits": dict(engram_votes=4, engram_match_orders=(1, 2, 5), engram_match_words=(1,), engram_logits=True),
    "votes alone": dict(engram_byte_orders=(), engram_votes=1),
    "any engram": dict(engram_byte_orders=(), engram_match_orders=(), engram_layers=()),
    "lora": dict(lora_rank=0), "lti": dict(lti=False), "experts": dict(n_routed_experts=0, n_shared_experts=3),
    "shared expert": dict(n_shared_experts=0), "loops": dict(n_loops=1), "prelude": dict(n_prelude_layers=0),
    "coda": dict(n_coda_layers=0), "all but a window": dict(byte_window=7),
}
LOOPS = 5                                 # more than the three that the models here are made for


def halting_model(dtype=torch.float64, seed: int = 0, **changes) -> Spider:
    """Everything awake, in evaluation mode, and segments halt after one loop to all."""
    model = awake(small_config(**(dict(n_loops=3) | changes)), seed, dtype).eval()
    if model.core is not None and model.core.halt_predictor is not None:
        with torch.no_grad():
            model.core.halt_predictor.weight.mul_(100)
            model.core.halt_predictor.bias.fill_(0.5)
    if dtype == torch.float64:
        model.set_backend("loop")         # grouped products know no float64
    return model


def rows_of_documents(seed: int = 0) -> torch.Tensor:
    """Three rows [3, 48] that change documents, and are cut, at different bytes: BOS without EOS, EOS without BOS, PAD,
    spaces."""
    rows = torch.cat((documents(48, seed=seed), documents(11, 2, 30, 5, seed=seed + 1), text(1, 48, seed + 2)))
    rows[0, 1::5] = ord(" ")
    rows[2, 9], rows[2, 20], rows[2, 33:36] = EOS_ID, BOS_ID, PAD_ID
    return rows


def fed(model: Spider, rows: torch.Tensor, ends: list[int], n_loops: int | None) -> torch.Tensor:
    state = model.decoding_state(len(rows), n_loops)
    return torch.cat([model.step(part, state) for part in rows.tensor_split(ends, dim=1)], dim=1)


def check_steps(model: Spider, rows: torch.Tensor, ends: list[int], n_loops: int | None = LOOPS, atol: float = 1e-9):
    """Bytes fed in parts that end at `ends` give the logits of the full pass."""
    with torch.no_grad():
        full = model(rows, n_loops=n_loops)
        torch.testing.assert_close(fed(model, rows, ends, n_loops), full.logits, rtol=0, atol=atol)
    return full


TELLING = ("nothing", "every byte", "places in words", "core", "act", "two segment engrams", "matches", "since words",
           "any engram", "coda", "all but a window")


@pytest.mark.parametrize("cut", [pytest.param(cut, id=name, marks=() if name in TELLING else pytest.mark.slow)
                                 for name, cut in CUTS.items()])
def test_steps_equal_the_full_pass_at_every_byte_whatever_is_cut_out(cut):
    model, rows, numbers = halting_model(**cut), rows_of_documents(), random.Random(len(cut))
    for ends in ([], list(range(1, 48)), sorted(numbers.sample(range(1, 48), 6))):
        out = check_steps(model, rows, ends)
    if model.core is not None and model.config.act:
        assert 1.1 < out.mean_loops < 4.5


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ends=st.sets(st.integers(1, 47)), seed=st.integers(0, 5), n_loops=st.integers(1, 5))
def test_steps_equal_the_full_pass_wherever_a_prompt_is_split(ends, seed, n_loops):
    check_steps(halting_model(seed=seed), rows_of_documents(seed), sorted(ends), n_loops)


@pytest.mark.parametrize("backend", ("loop", "grouped"))
def test_steps_equal_the_full_pass_to_rounding_in_float32(backend):
    model = awake(small_config()).eval()
    model.set_backend(backend)
    for ends in ([], [7, 8, 30], list(range(1, 48))):
        check_steps(model, rows_of_documents(), ends, None, atol=2e-5)


def test_a_prompt_longer_than_a_pass_is_read_in_several(monkeypatch):
    monkeypatch.setattr(decoding, "PIECE", 7)
    check_steps(halting_model(), rows_of_documents(), [23])


def test_a_long_text_outgrows_its_cache_slots_and_a_new_document_frees_them():
    model, row = halting_model(), torch.cat((documents(150), documents(70, seed=1)), dim=1)
    with torch.no_grad():
        full, state, places = model(row).logits, model.decoding_state(), []
        for t in range(220):
            torch.testing.assert_close(model.step(row[:, t:t + 1], state)[:, 0], full[:, t], rtol=0, atol=1e-9)
            places.append(state.byte_latents.shape[3])
    assert all(t + 1 <= n <= max(16, 2 * t + 2) for t, n in enumerate(places[:150]))
    assert len(set(places[:150])) < 8 and places[-1] < places[149]  # moved seldom
    assert state.convolved.shape[3] <= 2 * max(16, SegmentEngram.taps(model.config)[-1] + 1)


def test_the_core_runs_only_when_a_segment_ends_and_for_as_many_loops_as_it_takes():
    model, row, visits = halting_model(boundaries="whitespace"), text(1, 40), []
    row[row == ord(" ")] = ord("x")
    row[0, [9, 20, 21]] = ord(" ")
    model.core.layers[0].register_forward_pre_hook(lambda module, args: visits.append((t, len(args[0]))))
    model.core.halt = lambda h: h.new_full((len(h),), 0.6)  # all halts in its second loop, and is computed in a third
    state = model.decoding_state(n_loops=LOOPS)
    for t in range(40):
        model.step(row[:, t:t + 1], state)
    assert visits == [(t, 1) for t in (9, 20, 21) for _ in range(3)]
    visits.clear()
    model.step(row, model.decoding_state(n_loops=LOOPS))
    assert visits == [(39, 3)] * 3        # all segments of a prompt together


def test_the_core_of_several_rows_runs_for_those_alone_that_are_cut():
    model, rows, visits = halting_model(boundaries="whitespace", act=False), torch.full((3, 4), ord("x")), []
    rows[1, 2] = rows[2, 2] = rows[2, 3] = ord(" ")
    model.core.layers[0].register_forward_pre_hook(lambda module, args: visits.append(len(args[0])))
    check_steps(model, rows, [], 2)
    visits.clear()
    fed(model, rows, [1, 2, 3], 2)
    assert visits == [2, 2, 1, 1]


def test_a_copied_state_goes_its_own_way_and_rows_may_be_picked():
    model, rows = halting_model(), rows_of_documents()
    with torch.no_grad():
        full = model(rows, n_loops=LOOPS).logits
        state = model.decoding_state(3, LOOPS)
        model.step(rows[:, :29], state)
        other, picked = state.copy(), state.copy([2, 0, 0])
        model.step(text(3, 15, seed=8), other)
        torch.testing.assert_close(model.step(rows[[2, 0, 0], 29:], picked), full[[2, 0, 0], 29:], rtol=0, atol=1e-9)
        torch.testing.assert_close(model.step(rows[:, 29:], state), full[:, 29:], rtol=0, atol=1e-9)


def test_a_state_is_saved_as_plain_tensors_and_continues_where_it_was(tmp_path):
    model, rows = halting_model(), rows_of_documents()
    state = model.decoding_state(3, LOOPS)
    model.step(rows[:, :29], state)
    torch.save(vars(state.copy()), tmp_path / "state.pt")
    loaded = DecodingState(**torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(model.step(rows[:, 29:], loaded), model.step(rows[:, 29:], state))


def test_only_latents_are_kept_of_bytes():
    model = awake(small_config()).eval()
    state = model.decoding_state()
    model.step(text(1, 30), state)
    assert state.byte_latents.shape[-1] == state.segment_latents.shape[-1] == 16 + 8
    assert state.summed.dtype == torch.float64


def test_a_model_in_training_mode_refuses_to_decode():
    model = awake(small_config())
    with pytest.raises(RuntimeError, match="evaluation mode"):
        model.step(text(1, 3), model.decoding_state())


@pytest.mark.parametrize("window", (0, 1, 3, 8))
@pytest.mark.parametrize("parts", ([1] * 23, [9, 1, 1, 7, 5], [23]))
def test_a_cache_with_a_window_holds_it_alone_and_hides_the_rest(window, parts):
    """Two documents side by side, the second without its first five rows: it begins behind the other."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 30, 4, dtype=torch.float64, generator=generator)
    q = torch.randn(2, 30, 2, 4, dtype=torch.float64, generator=generator)
    held, before = torch.zeros(1, 1, 2, 1, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    for rows in ([5, 0], *([n, n] for n in parts)):
        cu_seqlens = torch.tensor([0, rows[0], sum(rows)], dtype=torch.int32)
        packing = Packing.build(cu_seqlens, sum(rows), max(rows), small_config(), torch.float64, 0, before)
        at = packing.document, packing.position
        cache = Cache(held, packing, before, window)
        for d, p, y in zip(*(t.tolist() for t in at), cache.attend(q[at], x[at], 0.7, 3)):
            keys = x[d, max(0, p + 1 - window) if window else 0:p + 1]
            torch.testing.assert_close(y, (0.7 * q[d, p] @ keys.T).softmax(-1) @ keys[:, :3], rtol=0, atol=1e-12)
        held, before = cache.held, before + torch.tensor(rows)
    assert not window or held.shape[3] <= max(16, 2 * (window + max(parts) - 1))


# ---------------------------------------------------------------------------------------------------------------------
# Writing

def test_what_is_generated_is_what_recomputation_would_write():
    model = halting_model()
    written = list(model.generate([BOS_ID, 65], 30, temperature=0))
    ids = [BOS_ID, 65]
    with torch.no_grad():
        for byte in written:
            assert byte == model(torch.tensor([ids])).logits[0, -1, :256].argmax()
            ids.append(byte)
    assert len(written) == 30


def test_several_samples_of_one_prompt_are_written_together_and_end_apart():
    model = halting_model()
    with torch.no_grad():
        model.lm_head.weight[EOS_ID] = model.lm_head.weight[32:127].mean(0) + 0.3 * torch.randn(32).double()
    state = model.decoding_state()
    logits = model.step(torch.tensor([[BOS_ID, 65]]), state)[:, -1]
    one, four = state.copy(), state.copy([0] * 4)
    generator = torch.Generator().manual_seed(1)
    columns = list(zip(*model.generate_batch(logits.expand(4, -1), four, 60, generator=generator)))
    lengths = [sum(byte is not None for byte in column) for column in columns]
    assert len(set(columns)) == 4 and len(set(lengths)) > 1
    for column, length in zip(columns, lengths):
        assert all(0 <= byte < 256 for byte in column[:length]) and set(column[length:]) <= {None}
    alike = list(model.generate_batch(logits.expand(3, -1), state.copy([0] * 3), 12, temperature=0))
    assert [[byte] * 3 for byte, in model.generate_batch(logits, one, 12, temperature=0)] == alike


def test_drawing_takes_the_likeliest_bytes_that_were_asked_for():
    logits = torch.full((4000, 272), -50.0)
    logits[:, [65, 66, 67, EOS_ID]] = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    logits[:, [PAD_ID, BOS_ID, 265]] = 10.0
    kept = logits.clone()
    def drawn(temperature=1.0, top_k=None, top_p=None):
        ids = draw(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return {int(i): float((ids == i).float().mean()) for i in ids.unique()}
    assert drawn(0) == {65: 1.0} and drawn(top_k=1) == {65: 1.0} and drawn(top_p=0.4) == {65: 1.0}
    assert drawn().keys() == {65, 66, 67, EOS_ID} and abs(drawn()[66] - 0.3) < 0.03
    for found in (drawn(top_k=2), drawn(top_p=0.7)):
        assert found.keys() == {65, 66} and abs(found[65] - 0.5 / 0.8) < 0.03
    assert drawn(top_p=0.81).keys() == {65, 66, 67} and drawn(top_k=999).keys() == drawn().keys()
    assert abs(drawn(temperature=0.5)[65] - 0.25 / (0.25 + 0.09 + 0.0225 + 0.0025)) < 0.03
    assert torch.equal(logits, kept)


def test_a_model_whose_weights_are_ruined_writes_nothing():
    model = awake(small_config()).eval()
    with torch.no_grad():
        model.lm_head.weight[5] = math.nan
    with pytest.raises(FloatingPointError, match="weights are ruined"):
        next(model.generate([BOS_ID], 3))


# ---------------------------------------------------------------------------------------------------------------------
# Planted faults: the check above fails on each

def newest_loop_alone(self, x, original=Cache.put):
    """Every loop reads what the newest loop of each earlier segment left."""
    loop, self.loop = self.loop, 0
    original(self, x)
    self.loop = loop
    return self.held[self.layer, loop]


def no_later_loop(self, x):
    """A halted segment leaves nothing to the loops that it did not take."""
    held = self.held[self.layer, self.loop]
    held.flatten(0, 1).index_copy_(0, self.slot, x)
    return held


def shifted_unpool(z, null, b, *cu_seqlens, original=segments.unpool_segments):
    return original(z, null, b.roll(1), *cu_seqlens)


def sum_that_begins_anew(self, predicted, ids, shifted, packing, noise, summed=None, original=Spider.boundaries):
    return original(self, predicted, ids, shifted, packing, noise)


def mean_without_earlier_bytes(h, b, cu_seqlens, open_segment=None, original=segments.sum_segments):
    return original(h, b, cu_seqlens)


def matches_of_earlier_documents(self, ids, shifted, position, held, original=MatchMemory.step):
    """Find also what another document, or nobody yet, wrote at slots to come."""
    out = original(self, ids, shifted, torch.full_like(position, held.shape[2] - 1), held)
    return out[0], original(self, ids, shifted, position, held)[1]


FAULTS = {
    "the newest loop's latents": (Cache, "put", newest_loop_alone),
    "no latents for the loops after halting": (Cache, "put", no_later_loop),
    "documents that are not forgotten": (DecodingState, "start_documents", lambda *_: None),
    "a segment handed to the byte behind it": (spider_model, "unpool_segments", shifted_unpool),
    "a boundary sum that begins anew": (Spider, "boundaries", sum_that_begins_anew),
    "matches wherever they lie": (MatchMemory, "step", matches_of_earlier_documents),
    "a mean that forgets earlier bytes": (decoding, "sum_segments", mean_without_earlier_bytes),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_planted_fault_is_noticed(fault, monkeypatch):
    model, rows = halting_model(), rows_of_documents()
    with torch.no_grad():
        full = model(rows, n_loops=LOOPS).logits
        monkeypatch.setattr(*fault)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(fed(model, rows, [5, 6, 7, 20, 31, 32], LOOPS), full, rtol=0, atol=1e-6)
