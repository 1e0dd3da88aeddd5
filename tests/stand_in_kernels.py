"""Plain operations in place of TileKernels, which need a GPU; routings for tests of experts."""

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F

import tile_moe

# shapes as in tile_moe.py; WIDTH is its F
N = 37
K = 2
E = 5
D = 32
WIDTH = 16
INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("tile_kernels") is None, reason='needs pip install -e ".[tile]"'
)


class Kernels:
    """TileKernels by their sources: the same requirements on arguments, results for NaN, an order
    within an expert unlike ours, and NaN where the kernels write nothing. A fault on the device is
    an IndexError."""

    @staticmethod
    def topk_gate(scores, num_topk):
        assert scores.dim() == 2 and scores.is_contiguous() and scores.dtype == torch.float32
        # a warp of 32 lanes reads a row
        scores = F.pad(scores, (0, -scores.shape[1] % 32), value=-math.inf)
        chosen = []
        for _ in range(num_topk):
            best = scores.nan_to_num(-math.inf, math.inf, -math.inf).amax(1, keepdim=True)
            found = torch.where(scores == best, torch.arange(scores.shape[1]), 2**31 - 1).amin(1)
            scores[torch.arange(scores.shape[1]) == found[:, None]] = -math.inf
            chosen.append(found)
        return torch.stack(chosen, 1)

    @staticmethod
    def normalize_weight(weights):
        assert weights.is_contiguous() and weights.dtype == torch.float32
        denominator = weights.sum(-1) + 1e-20
        return denominator, weights / denominator[:, None]

    @staticmethod
    def aux_fi(topk_idx, num_experts, num_aux_topk):
        assert topk_idx.is_contiguous()
        share = num_experts / (len(topk_idx) * num_aux_topk)
        if not ((topk_idx >= -1) & (topk_idx < num_experts)).all():
            raise IndexError("device-side assert triggered")
        return torch.stack(
            [sum([share] * int((topk_idx == e).sum()), torch.zeros(())) for e in range(num_experts)]
        )

    @staticmethod
    def get_fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment):
        assert topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        if not ((topk_idx >= -1) & (topk_idx < num_experts)).all():
            raise IndexError("an illegal memory access was encountered")

        def unset(size: int) -> torch.Tensor:
            return torch.full((size,), -1, dtype=torch.int32)

        pos_to_expert = unset(num_expanded_tokens)
        pos_to_token = unset(num_expanded_tokens)
        pos_to_slot = unset(num_expanded_tokens)
        slot_to_pos = unset(topk_idx.numel())
        starts = []
        ends = []
        end = 0
        for expert in range(num_experts):
            slots = (topk_idx.flatten() == expert).nonzero().flatten().flip(0).int()
            positions = slice(end, end + len(slots))
            pos_to_expert[positions] = expert
            pos_to_slot[positions] = slots
            pos_to_token[positions] = slots // topk_idx.shape[1]
            slot_to_pos[slots] = torch.arange(end, end + len(slots), dtype=torch.int32)
            starts.append(end)
            end += -(-len(slots) // alignment) * alignment
            ends.append(end)
        expert_start = torch.tensor(starts, dtype=torch.int32)
        expert_end = torch.tensor(ends, dtype=torch.int32)
        return (
            pos_to_expert,
            pos_to_token,
            pos_to_slot,
            slot_to_pos.view(topk_idx.shape),
            expert_start,
            expert_end,
            expert_end - expert_start,
            [],
        )

    @staticmethod
    def expand_to_fused(x, token_topk_to_pos, pos_to_expert):
        assert x.is_contiguous() and token_topk_to_pos.is_contiguous()
        out = torch.full((len(pos_to_expert), x.shape[1]), math.nan, dtype=x.dtype)
        out[pos_to_expert < 0] = 0
        has_position = token_topk_to_pos >= 0
        slots = x[:, None].expand(*token_topk_to_pos.shape, -1)
        out[token_topk_to_pos[has_position]] = slots[has_position]
        return out

    @staticmethod
    def reduce_fused(x, topk_weights, token_topk_to_pos):
        assert x.is_contiguous()
        assert x.shape[1] % tile_moe.TILE_WIDTH == 0
        assert topk_weights is None
        y = x[token_topk_to_pos].float().masked_fill((token_topk_to_pos < 0)[..., None], 0)
        return y.sum(1).to(x.dtype)


@pytest.fixture
def kernels(monkeypatch):
    """Make `tile` use these kernels."""
    monkeypatch.setattr(tile_moe, "operations", lambda: Kernels)
    monkeypatch.setattr(tile_moe, "TILE_WIDTH", D)


def routing(kind: str) -> torch.Tensor:
    """Return topk_idx [N, K] of one of ROUTINGS."""
    generator = torch.Generator().manual_seed(0)
    if kind == "two experts take all":
        return torch.tensor([[3, 1]]).repeat(N, 1)
    experts = E if kind == "uneven" else E - 1
    return torch.rand(N, experts, generator=generator).topk(K).indices


ROUTINGS = ("uneven", "two experts take all", "one expert gets nothing")
