"""The optimizers: Muon for matrices, AdamW (optionally 8-bit) for the rest, row-wise Adagrad for Engram tables.

`Optimizers` assigns each parameter to an optimizer and steps them together. Sources: Muon, Jordan et al. 2024, with the
step size of Moonlight (arXiv 2502.16982); bitsandbytes for 8-bit AdamW.
"""

import math

import torch
from torch import Tensor, nn

from spider.errors import CheckpointError
from spider.model.engram_table import EngramTable
from spider.model.parameters import Optimizer, kinds_of
from spider.training.adamw_8bit import BLOCK, adamw_8bit
from spider.training.muon import Muon
from spider.training.plan import OPTIMIZERS, OptimizerSettings
from spider.training.sharded_muon import MatrixAssignment
from spider.training.sharding import sharding_of


class Optimizers:
    """The optimizers of one model by name, stepped together.

    A slice without a gradient (an idle expert, an unused loop) still moves under AdamW, as in torch: by its fading
    momentum and by weight decay. Muon leaves it unchanged.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings = OptimizerSettings()):
        """settings.optimizer is for all but the Engram tables; raise ValueError if it is not one of OPTIMIZERS."""
        name = settings.optimizer
        if name not in OPTIMIZERS:
            raise ValueError(f"optimizer: {name!r} is not one of {', '.join(OPTIMIZERS)}")
        self.sharding = sharding_of(model)
        self.tables = tables = [m for m in model.modules() if isinstance(m, EngramTable)]
        params = self.sharding.parameters(model)
        kinds = kinds_of(model)
        matrices, rest, of_tables = ([key for key, kind in kinds.items() if kind.optimizer is optimizer]
                                     for optimizer in (Optimizer.MUON, Optimizer.ADAMW, Optimizer.ADAGRAD))
        assert len(of_tables) == len(tables) and len(params) == len(matrices) + len(rest) + len(tables)
        groups = {(True, 1.0): [], (False, 1.0): []}             # by weight decay and relative rate
        for key in rest:
            decays = kinds[key].decay and params[key].ndim >= 2
            groups.setdefault((decays, kinds[key].rate), []).append(params[key])
        adam = [dict(params=group, lr=settings.lr * rate, relative_rate=rate,
                     weight_decay=decays * settings.weight_decay) for (decays, rate), group in groups.items()]
        matrices, rest = ([params[key] for key in keys] for keys in (matrices, rest))
        self.dense = matrices + rest      # clipped; the step of a table's row does not depend on its gradient's norm
        self.by_name: dict[str, torch.optim.Optimizer] = {}
        if name == "muon":
            self.by_name["muon"] = Muon(matrices, settings.lr, settings.momentum, settings.weight_decay,
                                        self._assign(matrices))
        else:
            adam[0]["params"] += matrices
        of_adam = dict(lr=settings.lr, betas=(settings.beta1, settings.beta2))
        if name == "adamw8bit":
            self.by_name["adamw8bit"] = adamw_8bit(adam, of_adam, self.sharding.params)
        else:
            self.by_name["adamw"] = torch.optim.AdamW(adam, fused=True, **of_adam)
        if tables:
            self.by_name["engram"] = RowwiseAdagrad(tables, settings.engram_lr)

    def _assign(self, matrices: list[Tensor]) -> MatrixAssignment | None:
        """Assign matrices to ranks; return None if they are not sharded."""
        by_local = {id(param.local): param for param in self.sharding.params}
        if not by_local or not matrices:
            return None
        sharded = [by_local[id(p)] for p in matrices]
        return MatrixAssignment(self.sharding.world, [param.shape for param in sharded],
                                [param.bounds for param in sharded])

    def set_lr(self, peak: float, factor: float):
        """Set the learning rate to `peak * factor`, except for the tables, whose accumulators anneal it row by row."""
        for name, optimizer in self.by_name.items():
            for group in optimizer.param_groups if name != "engram" else ():
                group["lr"] = peak * factor * group.get("relative_rate", 1.0)

    def step(self):
        self.sharding.all_reduce_tables(self.tables)
        for optimizer in self.by_name.values():
            optimizer.step()

    def zero_grad(self):
        for optimizer in self.by_name.values():
            optimizer.zero_grad(set_to_none=True)

    def reset_tables(self):
        """Zero the Engram tables and their accumulators."""
        self.by_name["engram"].reset()

    def state_dict(self) -> dict:
        return self.sharding.optimizer_states(self.by_name)

    def load_state_dict(self, states: dict):
        """Load the states of all optimizers, but keep this run's settings. Raise CheckpointError if one does not
        fit."""
        if states.keys() != self.by_name.keys():
            raise CheckpointError(f"the checkpoint has the optimizers {', '.join(states)}, this run "
                                  f"{', '.join(self.by_name)}: use --optimizer as before, or --reset_steps")
        for name, optimizer in self.by_name.items():
            groups = [{key: value for key, value in group.items() if key != "params"}
                      for group in optimizer.param_groups]
            try:
                optimizer.load_state_dict(self.sharding.shard_states({name: optimizer}, states)[name])
                check_optimizer_state(name, optimizer)
            except Exception as fault:    # a foreign state may cause any error
                raise CheckpointError(f"the checkpoint's state of {name} does not fit this model ({fault}): use "
                                      f"--reset_steps to load only the weights") from None
            for group, settings in zip(optimizer.param_groups, groups):
                group.update(settings)


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of Engram tables. It updates only rows that were looked up, so the cost of a
    step does not depend on the size of the tables.

    A row's step is lr * sum(g) / sqrt(sum of mean(g^2) over all lookups so far), where g are the gradients of the
    step's lookups of that row, in all micro-steps. It neither sorts nor synchronizes.
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
                    p.index_add_(0, row, step)  # with alpha it is ten times slower on a CPU

    def zero_grad(self, set_to_none: bool = True):
        for table in self.tables.values():
            table.forget()

    @torch.no_grad()
    def reset(self):
        """Zero the tables and clear their accumulators."""
        for p in self.tables:
            p.zero_()
            self.state[p].clear()


def check_optimizer_state(name: str, optimizer: torch.optim.Optimizer):
    """Raise ValueError if a parameter's state lacks the names and shapes that kernels rely on, or if there is state of
    other parameters, which torch would keep."""
    kinds = {"muon": [{"momentum_buffer"}], "adamw": [{"step", "exp_avg", "exp_avg_sq"}], "engram": [{"sum"}],
             "adamw8bit": [{"step", "state1", "state2"},
                           {"step", "state1", "state2", "qmap1", "qmap2", "absmax1", "absmax2"}]}[name]
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if unknown := [key for key in optimizer.state if id(key) not in known]:
        raise ValueError(f"it has unknown parameters: {unknown[0]!r}")
    for group in optimizer.param_groups:
        for p in group["params"]:
            state, blocks = optimizer.state.get(p, {}), math.ceil(p.numel() / BLOCK)
            shapes = {"step": (), "sum": (len(p),) if p.ndim else (), "qmap1": (256,), "qmap2": (256,),
                      "absmax1": (blocks,), "absmax2": (blocks,)}
            if state and state.keys() not in kinds:
                raise ValueError(f"it has {', '.join(map(str, state))}")
            for key, value in state.items():
                shape = tuple(value.shape) if isinstance(value, Tensor) else ()
                if shape != shapes.get(key, tuple(p.shape)):
                    raise ValueError(f"{key} {list(shape)} for a parameter {list(p.shape)}")
