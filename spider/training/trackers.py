"""Trackers beside the log: wandb and torch's profiler."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from loguru import logger

from spider.errors import UsageError
from spider.training.progress import RunProgress


def start_wandb(name: str | None, settings: Mapping[str, object], progress: RunProgress, closing: ExitStack):
    """Start the wandb run that --run names, or return None; a checkpoint of the same name says which one to resume."""
    if not name:
        return None
    before = progress.wandb if progress.wandb and progress.wandb["name"] == name else {}
    try:
        import wandb
        run = wandb.init(project="spider", name=name, id=before.get("id"), resume="allow", config=dict(settings))
    except Exception as fault:            # of its installation, its settings, its network, its service
        raise UsageError(f"--run: wandb does not start: {fault}; WANDB_MODE=offline needs no network") from None
    progress.wandb = dict(name=name, id=run.id)
    closing.callback(run.finish)
    return run


def start_profiler(device: torch.device, directory: Path, closing: ExitStack):
    """Start torch's profiler over steps 3 to 5 of this process; leaves trace.json for chrome://tracing or Perfetto."""
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
