"""Plain operations in place of TileKernels, which need a GPU, and routings for tests of experts."""

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F

import tile_moe

N, K, E, D, WIDTH = 37, 2, 5, 32, 16
INSTALLED = pytest.mark.skipif(
    importlib.util.find_spec("tile_kernels") is None, reason='needs pip install -e ".[tile]"'
)


class Kernels:
    """TileKernels as in their sources: the same requirements of arguments, results for NaN, an
    order of their own inside an expert, and NaN where they write nothing. A fault on the device is
    an IndexError."""

    @staticmethod
    def topk_gate(scores, num_topk):
        assert scores.dim() == 2 and scores.is_contiguous() and scores.dtype == torch.float32
        # a warp a row
        scores, chosen = F.pad(scores, (0, -scores.shape[1] % 32), value=-math.inf), []
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
        to_expert, to_token, to_slot = (
            torch.full((num_expanded_tokens,), -1, dtype=torch.int32) for _ in range(3)
        )
        to_pos, starts, ends, end = (
            torch.full((topk_idx.numel(),), -1, dtype=torch.int32),
            [],
            [],
            0,
        )
        if not ((topk_idx >= -1) & (topk_idx < num_experts)).all():
            raise IndexError("an illegal memory access was encountered")
        for expert in range(num_experts):
            slots = (topk_idx.flatten() == expert).nonzero().flatten().flip(0).int()
            rows = slice(end, end + len(slots))
            to_expert[rows], to_slot[rows], to_token[rows] = (
                expert,
                slots,
                slots // topk_idx.shape[1],
            )
            to_pos[slots] = torch.arange(end, end + len(slots), dtype=torch.int32)
            starts.append(end)
            end += -(-len(slots) // alignment) * alignment
            ends.append(end)
        start, end = torch.tensor(starts, dtype=torch.int32), torch.tensor(ends, dtype=torch.int32)
        return (
            to_expert,
            to_token,
            to_slot,
            to_pos.view(topk_idx.shape),
            start,
            end,
            end - start,
            [],
        )

    @staticmethod
    def expand_to_fused(x, token_topk_to_pos, pos_to_expert):
        assert x.is_contiguous() and token_topk_to_pos.is_contiguous()
        out = torch.full((len(pos_to_expert), x.shape[1]), math.nan, dtype=x.dtype)
        out[pos_to_expert < 0] = 0
        held = token_topk_to_pos >= 0
        out[token_topk_to_pos[held]] = x[:, None].expand(*token_topk_to_pos.shape, -1)[held]
        return out

    @staticmethod
    def reduce_fused(x, topk_weights, token_topk_to_pos):
        assert x.is_contiguous() and x.shape[1] % tile_moe.TILE_WIDTH == 0 and topk_weights is None
        rows = x[token_topk_to_pos].float().masked_fill((token_topk_to_pos < 0)[..., None], 0)
        return rows.sum(1).to(x.dtype)


@pytest.fixture
def kernels(monkeypatch):
    """Make `tile` use the kernels above."""
    monkeypatch.setattr(tile_moe, "operations", lambda: Kernels)
    monkeypatch.setattr(tile_moe, "TILE_WIDTH", D)


def routing(kind: str) -> torch.Tensor:
    """Return topk_idx [N, K] of one of ROUTINGS."""
    generator = torch.Generator().manual_seed(0)
    if kind == "two experts take all":
        return torch.tensor([[3, 1]]).repeat(N, 1)
    experts = E if kind == "uneven" else E - 1
    return torch.rand(N, experts, generator=generator).topk(K).indices


ROUTINGS = "uneven", "two experts take all", "one expert gets nothing"
