"""Score rows of bytes: the one loop over them, and the one sum of what they give.

Three scorers share it. Training evaluates its validation rows (train.evaluate), sample.py --eval
scores texts (inference.adapt.score_windows), and --adapt scores texts from which the model learns
(inference.adapt.DynamicEvaluation). They differ in the function that reads a batch.

    score_batches   sum what a function reads from batches, over all ranks
    score_model     the same for a model in evaluation mode
    Totals          the sums, and the figures that follow from them
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

EVAL_BYTES = 8192  # minimum bytes per evaluation batch; larger ones fit without gradients


class BatchScore(NamedTuple):
    """What a model made of one batch. Each value is a scalar on the device."""

    nats: Tensor  # fp64, cross-entropy summed over the targets
    targets: Tensor  # labels that count
    segments: Tensor


@dataclass(frozen=True)
class Totals:
    """Sums over scored rows. Where nothing was scored, each quotient is 0."""

    nats: float = 0.0
    targets: int = 0  # labels that counted
    n_bytes: int = 0  # ids that were read, without padding
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
        """The cross-entropy in nats per target."""
        return self.nats / max(1, self.targets)

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2)

    @property
    def bytes_per_segment(self) -> float:
        return self.n_bytes / max(1, self.segments)


def score_batches(
    batches: Iterable[tuple[Tensor, Tensor]],
    read: Callable[[Tensor, Tensor], BatchScore],
    world: World,
    progress: ProgressBar | None,
) -> Totals:
    """Sum what `read` makes of each batch of (ids, labels), int64 [n, T], which it gets on the
    device. The batches are distributed over the ranks; every rank returns the totals of all.

    The sums stay on the device, in fp64, until the end: the host waits for it once."""
    sums = torch.zeros(4, device=world.device, dtype=torch.float64)
    # weight: 0 where a rank has no batch left, and only joins the collectives of the model
    for (ids, labels), weight in world.distribute(batches):
        ids = ids.to(world.device)
        reading = read(ids, labels.to(world.device))
        n_bytes = (ids != PAD_ID).sum()
        sums += weight * torch.stack((reading.nats, reading.targets, n_bytes, reading.segments))
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
    """Score batches by a model in evaluation mode. See score_batches."""

    def read(ids: Tensor, labels: Tensor) -> BatchScore:
        out = model(ids, labels, n_loops=n_loops)
        targets = (labels != IGNORED).sum()
        return BatchScore(out.nats_per_byte.double() * targets, targets, out.segments)

    with cast_weights_once(model):
        return score_batches(batches, read, world, progress)
