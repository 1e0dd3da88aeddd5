"""The optimizers: Muon for matrices, AdamW (in 8 bits too) for the rest, row-wise Adagrad for Engram tables.

`Optimizers` decides what belongs to which and steps them together. Sources: Muon, Jordan et al. 2024, with the step size
of Moonlight (arXiv 2502.16982); bitsandbytes for AdamW with states of 8 bits.
"""

import math


import torch
from torch import Tensor, nn

from spider.errors import CheckpointError
from spider.model.engram import EngramTable
from spider.model.parameters import matrices_of
from spider.training.machine import multiplies_bf16, quiet
from spider.training.plan import OPTIMIZERS, OptimizerSettings
from spider.training.ranks import World
from spider.training.sharded_muon import Deal
from spider.training.sharding import MIN_8BIT, check_blocks


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised (Jordan et al. 2024), for matrices [r, c] and stacks of them [..., r, c].

    torch.optim.Muon takes single matrices only; here a stack of experts, and all matrices of one shape, are one batch.
    The step has the size of AdamW's, 0.2 * sqrt(max(r, c)) times an orthogonal matrix (Moonlight, arXiv 2502.16982).
    That size does not fade with the momentum, so what had no gradient stays as it is, weights and momentum: a parameter
    without one, and in a stack each matrix of gradient zero (an idle expert, the adapter of a loop that did not run).
    """

    batch_elements = 1 << 26              # most elements stacked at a time

    def __init__(self, params, lr: float, momentum: float, weight_decay: float, deal: Deal | None = None):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))
        self.deal = deal                  # of several ranks: who orthogonalises which matrix

    @torch.no_grad()
    def step(self):
        for group in self.param_groups if self.deal is None else ():
            batches = {}
            for p in group["params"]:
                if p.grad is not None:
                    batches.setdefault(p.shape[-2:], []).append(p)
            for params in batches.values():
                per_batch = max(1, self.batch_elements // params[0].numel())
                for i in range(0, len(params), per_batch):
                    self._step_batch(params[i:i + per_batch], group)

        for group in self.param_groups if self.deal is not None else ():
            self._step_dealt(group["params"], group)

    def _step_dealt(self, params: list[Tensor], group: dict):
        """The same for params of which this rank has some rows, or some matrices of a stack."""
        momentum, lr = group["momentum"], group["lr"]
        dtype = torch.bfloat16 if multiplies_bf16(params[0].device) else torch.float32
        ahead, moved = [], []             # moved: 1 or 0, for each matrix of a stack, as below
        for p in params:
            if p.grad is None:
                moved.append(None)
                ahead.append(torch.zeros_like(p, dtype=dtype))
                continue
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
            buffer = self.state[p]["momentum_buffer"]
            moves = torch.linalg.vector_norm(p.grad, dim=(1, 2), keepdim=True) != 0 if p.ndim > 2 else p.new_ones(())
            moved.append(moves.to(p.dtype))
            buffer.lerp_(p.grad, moved[-1] * (1 - momentum))
            ahead.append(p.grad.lerp(buffer, momentum).to(dtype))
        for p, update, moves, size in zip(params, self.deal(ahead, orthogonalize), moved, self.deal.sizes):
            if moves is not None:
                p.mul_(1 - moves * (lr * group["weight_decay"]))
                p.add_(update.to(p.dtype).mul_(moves), alpha=-lr * 0.2 * size ** 0.5)

    def _step_batch(self, params: list[Tensor], group: dict):
        momentum, lr = group["momentum"], group["lr"]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        rows, columns = params[0].shape[-2:]
        weights = [p.view(-1, rows, columns) for p in params]                                # of n matrices together
        buffers = [self.state[p]["momentum_buffer"].view(-1, rows, columns) for p in params]
        grads = [p.grad.reshape(-1, rows, columns) for p in params]
        fresh, kept, moved, counts = 1 - momentum, 1 - lr * group["weight_decay"], None, [len(w) for w in weights]
        if any(p.ndim > 2 for p in params):  # 1 or 0 for each matrix, [n, 1, 1]: the host need not know
            moved = torch.cat([torch.linalg.vector_norm(g, dim=(1, 2), keepdim=True) for g in grads]) != 0
            fresh, kept = (torch.where(moved, part, rest).to(weights[0].dtype).split(counts)
                           for part, rest in ((fresh, 0.0), (kept, 1.0)))
        torch._foreach_lerp_(buffers, grads, fresh)
        if lr == 0:                       # weights stay; and a CPU's baddbmm in bf16 returns anything where both factors are 0
            return
        dtype = torch.bfloat16 if multiplies_bf16(params[0].device) else torch.float32
        ahead = weights[0].new_empty(sum(counts), rows, columns, dtype=dtype)
        for out, grad, buffer in zip(ahead.split(counts), grads, buffers):                   # Nesterov; size is no matter
            torch.add(grad, buffer, alpha=momentum / (1 - momentum), out=out)
        updates = orthogonalize(ahead, moved, -lr * 0.2 * max(rows, columns) ** 0.5).split(counts)
        for i, (p, update) in enumerate(zip(weights, updates)):
            if moved is None:
                torch.add(update, p, alpha=kept, out=p)
            else:
                torch.addcmul(update, p, kept[i], out=p)


def orthogonalize(matrices: Tensor, moved: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """[n, r, c] -> the same, singular values moved towards 1 by five Newton-Schulz steps of Muon's quintic, times scale;
    0 where `moved`, bool [n, 1, 1], says so. x is read and written by products alone: what its norm is stands in the
    first gram matrix, and it is divided in the first polynomial."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    for i in range(5):
        gram = x @ x.mT
        if i == 0:                        # its trace is the square of x's norm
            norm = gram.diagonal(dim1=1, dim2=2).sum(1, dtype=torch.float32).sqrt()[:, None, None]
            size = 1 / (norm + 1e-7) if moved is None else moved / (norm + 1e-7)
            gram = gram * (size * size).to(gram.dtype)
        polynomial = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        if i == 0:
            polynomial.diagonal(dim1=1, dim2=2).add_(3.4445)
            x = polynomial.mul_(size.to(x.dtype)) @ x
        else:                             # with 3.4445 on the diagonal bf16 would round two to three times as far
            last = scale if i == 4 else 1.0
            x = torch.baddbmm(x, polynomial, x, beta=3.4445 * last, alpha=last)
    return x.mT if tall else x


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of Engram tables, on the rows looked up only: a large table costs what is
    read of it.

    A row's step is lr * sum(g) / sqrt(sum of mean(g^2) over all lookups so far), sums over the step's lookups g of the
    row, however they are dealt out to micro-steps. It neither sorts nor synchronises.
    """

    def __init__(self, tables: list[EngramTable], lr: float):
        self.tables = {table.weight: table for table in tables}
        for table in tables:
            table.claimed = True
        super().__init__([*self.tables], dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                gathered = self.tables[p].gathered()
                if gathered and not self.state[p]:
                    self.state[p]["sum"] = gathered[0][2].new_zeros(len(p))
                for row, _, square in gathered:
                    self.state[p]["sum"].index_add_(0, row, square)
                for row, grad, _ in gathered:
                    scale = -group["lr"] / (self.state[p]["sum"].index_select(0, row).sqrt_() + 1e-10)
                    step = (grad * scale[:, None]).to(p.dtype)
                    p.index_add_(0, row, step)  # its alpha would make it ten times slower on a CPU

    def zero_grad(self, set_to_none: bool = True):
        for table in self.tables.values():
            table.forget()

    @torch.no_grad()
    def reset(self):
        """Empties the tables and forgets their past."""
        for p in self.tables:
            p.zero_()
            self.state[p].clear()


class Optimizers:
    """The optimizers of one model by name, stepped together; what belongs to which is decided here.

    A slice without gradient (of an expert, of a loop) goes on moving under AdamW, as it does in torch: by its momentum
    while that fades, and by weight decay. Muon leaves it alone.
    """

    def __init__(self, model: nn.Module, name: str = "muon", settings: OptimizerSettings = OptimizerSettings(),
                 world: World | None = None):
        """name: one of OPTIMIZERS, beside which tables have their own; ValueError for another name."""
        if name not in OPTIMIZERS:
            raise ValueError(f"optimizer: {name!r} is not one of {', '.join(OPTIMIZERS)}")
        self.world = World() if world is None else world
        self.tables = tables = [m for m in model.modules() if isinstance(m, EngramTable)]
        params = self.world.parameters(model)
        names = matrices_of(model)
        matrices = [p for key, p in params.items() if key in names]
        taken = {id(p) for p in [table.weight for table in tables] + matrices}
        rest = [p for p in params.values() if id(p) not in taken]
        adam = [dict(params=[p for p in rest if p.ndim >= 2], weight_decay=settings.weight_decay),
                dict(params=[p for p in rest if p.ndim < 2], weight_decay=0.0)]
        self.dense = matrices + rest      # what clipping sees; a row's step does not depend on its gradient's size
        self.parts: dict[str, torch.optim.Optimizer] = {}
        if name == "muon":
            deal = Deal(self.world, matrices) if self.world.ranks > 1 and matrices else None
            self.parts["muon"] = Muon(matrices, settings.lr, settings.momentum, settings.weight_decay, deal)
        else:
            adam[0]["params"] += matrices
        adam_settings = dict(lr=settings.lr, betas=(settings.beta1, settings.beta2))
        if name == "adamw8bit":
            self.parts["adamw8bit"] = adamw_8bit(adam, adam_settings, self.world)
        else:
            self.parts["adamw"] = torch.optim.AdamW(adam, fused=True, **adam_settings)
        if tables:
            self.parts["engram"] = RowwiseAdagrad(tables, settings.engram_lr)

    def set_lr(self, peak: float, factor: float):
        """The schedule's factor of the peak for all but the tables, whose accumulators anneal them row by row."""
        for name, part in self.parts.items():
            for group in part.param_groups if name != "engram" else ():
                group["lr"] = peak * factor

    def step(self):
        self.world.add_up(self.tables)
        for part in self.parts.values():
            part.step()

    def zero_grad(self):
        for part in self.parts.values():
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return self.world.states_of(self.parts)

    def load_state_dict(self, states: dict):
        if states.keys() != self.parts.keys():
            raise CheckpointError(f"the checkpoint's optimizers are {', '.join(states)}, this run's "
                             f"{', '.join(self.parts)}: use --optimizer as before, or --reset_steps")
        for name, part in self.parts.items():
            groups = [{key: value for key, value in group.items() if key != "params"} for group in part.param_groups]
            try:
                part.load_state_dict(self.world.own_states({name: part}, states)[name])
                check_optimizer_state(name, part)
            except Exception as fault:    # whatever a foreign state provokes
                raise CheckpointError(f"the checkpoint's state of {name} does not fit this model ({fault}): --reset_steps "
                                 f"takes the weights alone") from None
            for group, settings in zip(part.param_groups, groups):
                group.update(settings)    # the flags of this run, not of the one before


def adamw_8bit(params, settings: dict, world: World) -> torch.optim.Optimizer:
    """bitsandbytes' AdamW8bit; on shards with the bits, and the blocks of one scale, that the whole parameter has."""
    with quiet():
        import bitsandbytes

    class ShardedAdamW8bit(bitsandbytes.optim.AdamW8bit):
        def get_config(self, gindex, pindex, group):
            config = super().get_config(gindex, pindex, group)
            whole = world.whole_size(group["params"][pindex])
            return config | dict(min_8bit_size=0 if whole >= MIN_8BIT else math.inf)

        def update_step(self, group, p, gindex, pindex):
            if p.numel():                 # a shard may have no row of it
                super().update_step(group, p, gindex, pindex)

    if world.ranks == 1:
        return bitsandbytes.optim.AdamW8bit(params, **settings)
    check_blocks(world.parts)
    return ShardedAdamW8bit(params, **settings)


def check_optimizer_state(name: str, part: torch.optim.Optimizer):
    """ValueError where the state of a parameter is not of the names and shapes that its kernels take for granted."""
    kinds = {"muon": [{"momentum_buffer"}], "adamw": [{"step", "exp_avg", "exp_avg_sq"}], "engram": [{"sum"}],
             "adamw8bit": [{"step", "state1", "state2"},
                           {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}]}[name]
    for group in part.param_groups:
        for p in group["params"]:
            state, blocks = part.state.get(p, {}), math.ceil(p.numel() / 256)
            shapes = {"step": (), "sum": (len(p),) if p.ndim else (), "qmap1": (256,), "qmap2": (256,),
                      "absmax1": (blocks,), "absmax2": (blocks,)}
            if state and state.keys() not in kinds:
                raise ValueError(f"it has {', '.join(map(str, state))}")
            for key, value in state.items():
                shape = tuple(value.shape) if isinstance(value, Tensor) else ()
                if shape != shapes.get(key, tuple(p.shape)):
                    raise ValueError(f"{key} {list(shape)} for a parameter {list(p.shape)}")
