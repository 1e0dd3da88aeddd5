"""Resolve the flags of a command into the `Plan` of a run, in stages that take and return values.

`resolve_plan` calls the stages in order: recipe, model, batch, horizon, machine, memory. The rest
of the file has the stage for --minutes, warnings about an unsuitable horizon, and the dry run."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger

from spider import machine
from spider.config import MAX_INT, RECOMPUTE, SpiderConfig
from spider.errors import UsageError, print_line
from spider.model.memory import tables_of
from spider.training import estimate, fp8, optim, run, state
from spider.training.checkpoint import FROM_SCRATCH, StartCheckpoint, check_weights
from spider.training.distributed import World
from spider.training.plan import CommandLine, Plan, Recipe
from spider.vocabulary import VOCAB_SIZE
from spider_model import Spider
from tile_moe import KERNELS, has_grouped_kernel, resolve_backend

if TYPE_CHECKING:
    from train import Flags

MAX_MICRO_BATCH = 1 << 16  # sequences, if --global_batch chooses the micro-batch
MAX_SPLITS = 64  # per step; estimating the memory of one split takes milliseconds

Split = dict[str, Any]  # how a step is split into micro-steps: micro_batch and grad_accum


def resolve_plan(
    command: CommandLine,
    recipes: Mapping[str, Recipe],
    world: World,
    start: StartCheckpoint = FROM_SCRATCH,
    model_class: type[Spider] = Spider,
    held_out: int = 0,
) -> Plan:
    """Resolve a command line into the plan of a run.

    recipes: the defaults of each model. start: the checkpoint to start from. held_out: bytes of
    validation data. Raise UsageError for flags that contradict one another or that this machine
    does not support, and CheckpointError if the checkpoint holds a different model."""
    given = command.given
    # Rank 0 chooses: ranks with different GPUs could disagree.
    choose = partial(recipe_of, command.flags.model, start, world.device)
    recipe = world.on_rank0(choose)
    defaults = recipes[recipe]
    flags = with_recipe(command, defaults, start)
    config, requested = model_config(flags, recipe, start)
    model = state.on_meta(model_class, config)
    if start.path is not None:
        expected = model if requested == config else state.on_meta(model_class, requested)
        world.on_rank0(partial(check_weights, start.path, start.state, expected))

    if not tables_of(model):
        if flags.engram_reset and "engram_reset" in given:
            raise UsageError("--engram_reset: this model has no Engram tables")
        flags = replace(flags, engram_reset=False)
    splits = splits_of(flags, given, world.ranks, start)
    # The horizon needs the bytes per step, which all splits share; with_memory picks the split.
    flags = with_split(flags, splits[0], world.ranks)
    flags = with_horizon(flags, given, defaults, model)
    flags = with_machine(flags, config, world)
    plan = Plan(
        flags,
        given,
        recipe,
        defaults,
        config,
        model_class,
        model,
        ranks=world.ranks,
        checkpoint_size=sum(estimate.state_size(model, flags.optimizer)),
    )
    plan = with_evaluations(plan, held_out, start)
    return with_memory(plan, splits, world)


# --------------------------------------------------------------------------------------------------
# Recipe and model


MEMORY_OF_1B = 20e9  # bytes; less has room for weights and optimizer, but hardly for a micro-batch


def recipe_of(model: str, start: StartCheckpoint, device: torch.device) -> str:
    """Choose the recipe: --model, else the checkpoint's recipe, else one that suits the device.

    Without bf16, `1b` would take weeks on a GPU."""
    if model != "auto":
        return model
    if recorded := start.state.get("recipe"):
        return recorded
    is_small = device.type == "cpu" or machine.memory_of(device) < MEMORY_OF_1B
    return "tiny" if is_small or not machine.has_bf16(device) else "1b"


def with_recipe(command: CommandLine, recipe: Recipe, start: StartCheckpoint) -> "Flags":
    """Set the flags that are not given from the recipe and the checkpoint."""
    flags, given, _ = command
    defaults = dict(recipe.values)
    if "micro_batch" in given:  # then --grad_accum sets the bytes of a step
        defaults.pop("global_batch", None)
    if start.state:
        defaults["n_loops"] = start.state["n_loops"]
    if start.resumes and flags.minutes is not None:
        check_minutes(flags, start.flags)
        for name in ("target_tokens", "eval_tokens"):  # chosen by --minutes at step 0
            if name in start.flags:
                defaults[name] = start.flags[name]
    return replace(flags, **{name: value for name, value in defaults.items() if name not in given})


def check_minutes(flags: "Flags", recorded: Mapping[str, Any]):
    """Raise UsageError unless --minutes is the value with which the run to resume was started."""
    before = recorded.get("minutes")
    if before == flags.minutes:
        return
    started = "without --minutes: leave the flag out"
    if before is not None:
        started = f"with --minutes {before:g}: give the same value"
    raise UsageError(
        f"--minutes {flags.minutes:g}: this run was started {started} to continue it; to train it "
        f"longer, --resume it in a new --ckpt_dir with a larger --target_tokens"
    )


def model_config(
    flags: "Flags", recipe: str, start: StartCheckpoint
) -> tuple[SpiderConfig, SpiderConfig]:
    """Return two configurations, both with --set applied: the model's, and the one that --model
    requests.

    The first is the checkpoint's if there is a checkpoint, else the recipe's. The weights of both
    must have the same shapes. Raise UsageError for a bad name or value in --set."""
    try:
        fresh = SpiderConfig.preset(recipe).changed(flags.set or "")
        if not start.state:
            config = replace(fresh, n_loops=flags.n_loops)
            return config, config
        saved = SpiderConfig.from_saved(start.state["cfg"])
        config = replace(saved, vocab_size=VOCAB_SIZE).changed(flags.set or "")
    except ValueError as fault:
        raise UsageError(f"--set: {fault}") from None
    if flags.model == "auto":
        return config, config
    return config, replace(fresh, n_loops=config.n_loops)


# --------------------------------------------------------------------------------------------------
# Batch and horizon


def splits_of(
    flags: "Flags", given: Set[str], ranks: int, start: StartCheckpoint = FROM_SCRATCH
) -> list[Split]:
    """Return the splits of a step that the flags allow, in order of preference.

    With --global_batch (given, or from the recipe), return the splits that result in this many
    bytes, at most MAX_SPLITS, the largest micro-batch first; with_memory picks one by memory. A
    resumed run prefers the split that it had."""
    if flags.global_batch is None:
        return [dict(micro_batch=flags.micro_batch, grad_accum=flags.grad_accum)]
    row_bytes = flags.seq_len * ranks  # bytes of one sequence on every rank
    sequences, rest = divmod(flags.global_batch, row_bytes)
    if rest and "global_batch" not in given:  # round up the recipe's bytes
        sequences += 1
        rest = 0
    fixed = {name: getattr(flags, name) for name in ("micro_batch", "grad_accum") if name in given}
    splits = []
    for micro_batch in range(min(sequences, MAX_MICRO_BATCH), 0, -1):
        split = dict(micro_batch=micro_batch, grad_accum=sequences // micro_batch)
        if sequences % micro_batch == 0 and fixed.items() <= split.items():
            splits.append(split)
    if rest or not splits:
        times = "".join(f" times --{name} {value}" for name, value in fixed.items())
        raise UsageError(
            f"--global_batch: {flags.global_batch:,} bytes are not a multiple of {row_bytes:,} "
            f"(--seq_len times ranks){times}"
        )
    while len(splits) > MAX_SPLITS:
        del splits[-2::-2]  # keep the last one, which takes the least memory
    if start.resumes:
        before = start.flags.get("micro_batch")
        splits.sort(key=lambda split: split["micro_batch"] != before)
    return splits


def with_split(flags: "Flags", split: Split, ranks: int) -> "Flags":
    """Set the split of a step, and the bytes per step that follow from it."""
    step_bytes = split["micro_batch"] * split["grad_accum"] * ranks * flags.seq_len
    return replace(flags, **split, global_batch=step_bytes)


def with_half_micro_batch(plan: Plan) -> Plan:
    """Halve the micro-batch, rounded down to a divisor of a rank's sequences per step. The bytes
    per step stay the same."""
    sequences = plan.flags.micro_batch * plan.flags.grad_accum
    micro_batch = plan.flags.micro_batch // 2
    while sequences % micro_batch:
        micro_batch -= 1
    split = dict(micro_batch=micro_batch, grad_accum=sequences // micro_batch)
    return replace(plan, flags=with_split(plan.flags, split, plan.ranks))


def with_horizon(flags: "Flags", given: Set[str], recipe: Recipe, model: Spider) -> "Flags":
    """Resolve --target_tokens, and the flags that the recipe derives from the horizon.

    Raise UsageError if a flag needs evaluations, but evaluation is disabled."""
    config = model.config
    target: float = flags.target_tokens
    if flags.target_flops:
        target = flags.target_flops / estimate.flops_per_byte(
            model, config.bytes_per_segment, flags.n_loops, flags.seq_len
        )
    elif flags.target_param_data_ratio:
        parameters = sum(
            model.get_parameter(name).numel()
            for name, kind in optim.kinds_of(model).items()
            if kind.component != optim.ENGRAM_TABLES
        )
        target = flags.target_param_data_ratio * parameters
    flags = replace(flags, target_tokens=max(1, math.ceil(min(target, MAX_INT))))

    derived: dict[str, Any] = {
        name: rule(flags, config) for name, rule in recipe.rules.items() if name not in given
    }
    flags = replace(flags, **derived)
    if not flags.eval_every:
        for name in ("keep_best", "patience"):
            if getattr(flags, name):
                raise UsageError(
                    f"--{name} needs the validation loss, but --eval_every 0 disables evaluation"
                )
    return flags


def with_evaluations(plan: Plan, held_out: int, start: StartCheckpoint = FROM_SCRATCH) -> Plan:
    """Limit evaluations to a sixth of the training time, if the recipe or --minutes chooses how
    many there are: evaluate less often, but at least once; then read fewer bytes per evaluation.

    A byte costs a third as much to evaluate as to train on, so all evaluations together may read
    half as many bytes as the training. Use the horizon, not --max_steps, so that a run that resumes
    with more steps evaluates like an uninterrupted one."""
    flags = plan.flags
    by_rule = "eval_every" in plan.defaults.rules.keys() - plan.given
    if not flags.eval_every or not (by_rule or flags.minutes):
        return plan
    affordable = flags.target_tokens // 2  # bytes of all evaluations
    n_bytes = max(1, min(flags.eval_tokens, held_out))  # per evaluation
    eval_every = flags.eval_every
    if by_rule:
        most = max(1, affordable // n_bytes)
        eval_every = max(eval_every, math.ceil(plan.horizon / most))
    evaluations = math.ceil(plan.horizon / eval_every)  # the last step has one, too
    eval_tokens = flags.eval_tokens
    # A run from before this limit keeps its --eval_tokens, so that its losses stay comparable.
    is_kept = start.resumes and start.flags.get("eval_tokens") == eval_tokens
    if evaluations * n_bytes > affordable and not is_kept and "eval_tokens" not in plan.given:
        eval_tokens = max(1, affordable // evaluations)
    return replace(plan, flags=replace(flags, eval_every=eval_every, eval_tokens=eval_tokens))


def with_minutes(plan: Plan, held_out: int, rate: float) -> Plan:
    """Choose --target_tokens, and what follows from it, for a run of --minutes at `rate` bytes/s.
    From then on, --target_tokens counts as given."""
    assert plan.flags.minutes is not None
    total = int(min(60 * plan.flags.minutes * rate, MAX_INT))  # bytes, without evaluations
    given = plan.given | {"target_tokens"}

    def with_target(target: int) -> Plan:
        flags = replace(plan.flags, target_tokens=max(plan.step_bytes, target))
        flags = with_horizon(flags, given, plan.defaults, plan.model)
        return with_evaluations(replace(plan, flags=flags, given=given), held_out)

    longer = with_target(total)  # its evaluations cost at least as much as those of the final plan
    if longer.flags.eval_every:
        evaluations = math.ceil(longer.horizon / longer.flags.eval_every)
        total -= evaluations * min(longer.flags.eval_tokens, held_out) // 3
    return with_target(total)


# --------------------------------------------------------------------------------------------------
# Machine and memory


def with_machine(flags: "Flags", config: SpiderConfig, world: World) -> "Flags":
    """Resolve precision, compilation, optimizer and expert backend; log what does not work here.

    Unlike the stages before, this stage queries the hardware and the other ranks."""
    device = world.device
    compiles = machine.resolve_compile(flags.compile, device)
    precision = machine.resolve_precision(flags.precision, device)
    if flags.fp8_experts:
        check_fp8_experts(precision, device, config)
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    backend, remark = resolve_backend(flags.moe_backend, device, config, dtype, compiles)
    if remark:
        logger.info(remark)
    # Ranks with different GPUs may choose different kernels: keep a kernel only if all chose it.
    if flags.moe_backend == "auto":
        agreed = any(world.all(backend == name) for name in KERNELS)
        backend = backend if agreed else "grouped"
    return replace(
        flags,
        precision=precision,
        moe_backend=backend,
        compile=flags.compile if compiles else "off",
        optimizer="muon" if flags.optimizer == "auto" else flags.optimizer,
    )


def check_fp8_experts(precision: str, device: torch.device, config: SpiderConfig):
    """Raise UsageError if --fp8_experts is not supported."""
    if not config.has_experts:
        raise UsageError("--fp8_experts: this model has no routed experts")
    if precision != "fp8":
        raise UsageError(f"--fp8_experts needs --precision fp8; the precision is {precision}")
    if device.type == "cuda" and not has_grouped_kernel(device, torch.bfloat16):
        raise UsageError(
            "--fp8_experts: torch's grouped FP8 product needs sm_90 or sm_100; leave out the flag "
            "to run the experts in bf16"
        )


def with_memory(plan: Plan, splits: Sequence[Split], world: World) -> Plan:
    """Choose the split and --recompute by the estimated memory of a step. Rank 0 chooses for all.

    auto: the least recomputation first; among equals, the first split that fits."""
    requested = plan.flags.recompute
    choices = RECOMPUTE if requested == "auto" else (requested,)
    plans = []
    for recompute, split in product(choices, splits):
        flags = replace(with_split(plan.flags, split, world.ranks), recompute=recompute)
        plans.append(replace(plan, flags=flags))
    i, memory = world.on_rank0(partial(estimate.first_that_fits, plans, world))
    return replace(plans[i], memory=memory)


# --------------------------------------------------------------------------------------------------
# Warnings

# Limits beyond which there is a warning
MAX_EPOCHS = 20
MIN_STEPS = 250  # n large steps end 3 / n to 6 / n nats above many small steps
HIGH_AT_END = 2  # learning rate of the last step, relative to the rate at the horizon
MUCH_HIGHER = 1.5  # learning rate of a resumed run, relative to its rate before


def horizon_warnings(
    plan: Plan, epochs: float, horizon: int, rate_of: Callable[[int], float]
) -> list[str]:
    """Return warnings if the horizon, in steps, does not suit the data or --max_steps.

    epochs: the number of times that the run reads the source that it repeats most. rate_of: returns
    the learning rate of a step (from 0) as a fraction of the peak."""
    flags = plan.flags
    if flags.mock_data:
        return []
    warnings = []
    if epochs > MAX_EPOCHS:
        warnings.append(
            f"{epochs:,.0f} epochs memorize the data: use --target_tokens "
            f"{int(flags.target_tokens * MAX_EPOCHS / epochs)}, or more data"
        )
    smallest = plan.ranks * flags.seq_len  # bytes per step, with one sequence per rank
    if horizon < MIN_STEPS and plan.step_bytes > smallest:
        better = max(1, flags.target_tokens // (4 * MIN_STEPS * smallest)) * smallest
        warnings.append(
            f"the horizon is only {horizon:,} steps: fewer bytes per step (--global_batch "
            f"{better}, without --micro_batch and --grad_accum) give a lower loss, but a GPU takes "
            f"longer"
        )
    last = min(horizon, flags.max_steps or horizon)
    last_rate = rate_of(last - 1)
    least_rate = rate_of(horizon)
    if flags.max_steps > horizon:
        warnings.append(
            f"--max_steps {flags.max_steps:,} is beyond the horizon of {horizon:,} steps: later "
            f"steps run at the minimum learning rate, {flags.lr * least_rate:.2e}; raise "
            f"--target_tokens to schedule all steps"
        )
    if flags.warmup_steps >= last:
        warnings.append(
            f"step {last} is in the warm-up, at {last_rate:.0%} of the peak: lower --warmup_steps "
            f"to {last // 5}"
        )
    elif last < horizon and last_rate > HIGH_AT_END * least_rate:
        warnings.append(
            f"--max_steps {flags.max_steps} ends at {last_rate:.0%} of the peak rate: use "
            f"--target_tokens {flags.max_steps * plan.step_bytes}"
        )
    return warnings


def rise_warning(progress: run.RunProgress, rate: float) -> list[str]:
    """Return a warning if a run resumes at a much higher learning rate than before, or nothing.

    This happens if the horizon is raised after the rate has decayed. rate: the rate of the last
    step by the present schedule. The warm-up causes no warning: both rates are for the same step.
    """
    before = (progress.metrics or {}).get("lr")
    if not before or rate < MUCH_HIGHER * before:
        return []
    return [f"the learning rate rises from {before:.2e} to {rate:.2e}, and the loss with it"]


# --------------------------------------------------------------------------------------------------
# The dry run


def print_dry_run(
    plan: Plan, remarks: Sequence[str], world: World, time_steps: Callable[[], float]
) -> int:
    """Print what a run would do, what it needs, and the verdict.

    remarks: more lines of the log. time_steps: returns the bytes/s of a few timed steps. Return the
    exit status: 1 if memory or disk is too small, else 0."""
    flags = plan.flags
    estimate.print_tables(plan)
    if flags.precision == "fp8":
        print(fp8.describe_fp8(plan.model, flags.fp8_experts))
    needs, lacking = estimate.describe_needs(plan, world)
    for line in (*remarks, *needs):
        print_line(line)

    peak = machine.matmul_rate(world.device) * world.ranks
    fastest, expected = estimate.predict_speed(plan, peak)
    steps = flags.max_steps or plan.horizon
    n_bytes = steps * plan.step_bytes
    if estimate.is_timed(plan, world, fastest):
        rate = time_steps()
        duration = f"{estimate.describe_duration(n_bytes / rate)} at {rate:,.0f} bytes/s, as timed"
    else:
        duration = (
            f"at least {estimate.describe_duration(n_bytes / fastest)}: matrix products alone "
            f"allow {fastest:,.0f} bytes/s"
        )
        if world.device.type == "cuda" and flags.precision != "fp32":
            duration = (
                f"about {estimate.describe_duration(n_bytes / expected)} at an expected "
                f"{expected:,.0f} bytes/s, {duration}"
            )
    print_line(f"run: {steps:,} steps of {plan.step_bytes:,} bytes, {duration}")
    if lacking:
        print_line(f"verdict: NOT ENOUGH {'; '.join(lacking)}")
        return 1
    print_line("verdict: enough memory and disk")
    return 0
