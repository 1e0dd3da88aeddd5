"""Score rows of bytes: one loop over batches, and one sum of their results.

Three scorers share it; they differ in the function that scores a batch. Training evaluates its
validation rows (train.evaluate), sample.py --eval scores texts (inference.adapt.score_windows), and
--adapt scores texts while the model learns from them (inference.adapt.DynamicEvaluation).

    score_batches   sum the scores that a function gives batches, over all ranks
    score_model     the same, for a model in evaluation mode
    Totals          the sums, and the figures computed from them
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spider.errors import ProgressBar
from spider.model.layers import cast_weights_once
from spider.training.distributed import World
from spider.vocabulary import IGNORED, PAD_ID

EVAL_BYTES = 8192  # minimum bytes per evaluation batch: without gradients, large batches fit


class BatchScore(NamedTuple):
    """The score of one batch. Each value is a scalar on the device."""

    nats: Tensor  # fp64, cross-entropy summed over the targets
    targets: Tensor  # number of labels that count
    segments: Tensor


@dataclass(frozen=True)
class Totals:
    """Sums over scored rows. If nothing was scored, each quotient is 0."""

    nats: float = 0.0
    targets: int = 0  # labels that count
    n_bytes: int = 0  # ids read, without padding
    segments: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(
            self.nats + other.nats,
            self.targets + other.targets,
            self.n_bytes + other.n_bytes,
            self.segments + other.segments,
        )

    @property
    def loss(self) -> float:
        """Return the cross-entropy in nats per target."""
        return self.nats / max(1, self.targets)

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2)

    @property
    def bytes_per_segment(self) -> float:
        return self.n_bytes / max(1, self.segments)


def score_batches(
    batches: Iterable[tuple[Tensor, Tensor]],
    score: Callable[[Tensor, Tensor], BatchScore],
    world: World,
    progress: ProgressBar | None,
) -> Totals:
    """Score batches of (ids, labels), int64 [rows, T], distributed over the ranks; return the
    totals of all ranks on every rank. `score` gets its batch on the device.

    The sums stay on the device, in fp64, until the end, so the host waits for it once."""
    sums = torch.zeros(4, device=world.device, dtype=torch.float64)
    # weight: 0 if a rank has no batch left and only joins the model's collectives
    for (ids, labels), weight in world.distribute(batches):
        ids = ids.to(world.device)
        result = score(ids, labels.to(world.device))
        n_bytes = (ids != PAD_ID).sum()
        sums += weight * torch.stack((result.nats, result.targets, n_bytes, result.segments))
        if progress is not None:
            progress.add(ids.numel())
    nats, targets, n_bytes, segments = world.sum(sums).tolist()
    return Totals(nats, int(targets), int(n_bytes), int(segments))


@torch.no_grad()
def score_model(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    n_loops: int,
    world: World,
    progress: ProgressBar | None = None,
) -> Totals:
    """Score batches with a model in evaluation mode, see score_batches."""

    def score(ids: Tensor, labels: Tensor) -> BatchScore:
        out = model(ids, labels, n_loops=n_loops)
        targets = (labels != IGNORED).sum()
        return BatchScore(out.nats_per_byte.double() * targets, targets, out.segments)

    with cast_weights_once(model):
        return score_batches(batches, score, world, progress)
