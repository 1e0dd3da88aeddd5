"""wandb and torch's profiler."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from loguru import logger

from spider.errors import UsageError
from spider.training.progress import RunProgress


def start_wandb(name: str | None, settings: Mapping[str, object], progress: RunProgress, closing: ExitStack):
    """Start the wandb run of --run, or return None; resume the run of that name that the checkpoint recorded."""
    if not name:
        return None
    before = progress.wandb if progress.wandb and progress.wandb["name"] == name else {}
    try:
        import wandb
        run = wandb.init(project="spider", name=name, id=before.get("id"), resume="allow", config=dict(settings))
    except Exception as fault:            # installation, settings, network or service
        raise UsageError(f"--run: wandb does not start: {fault}; WANDB_MODE=offline needs no network") from None
    progress.wandb = dict(name=name, id=run.id)
    closing.callback(run.finish)
    return run


def start_profiler(device: torch.device, directory: Path, closing: ExitStack):
    """Profile steps 3 to 5 of this process; write trace.json for chrome://tracing or Perfetto."""
    from torch.profiler import ProfilerActivity, profile, schedule
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")

    def write(finished):
        finished.export_chrome_trace(str(directory / "trace.json"))
        order = f"self_{device.type}_time_total"
        table = finished.key_averages().table(sort_by=order, row_limit=25)
        for line in ("profile of steps 3 to 5:", *table.split("\n")):
            logger.info(line)
    profiler = profile(activities=activities, schedule=schedule(wait=1, warmup=1, active=3, repeat=1),
                       on_trace_ready=write)
    profiler.start()
    closing.callback(profiler.stop)
    return profiler
