"""started-over.json: the start of a new run in a directory with checkpoints of earlier runs.

It is valid until the new run has saved a checkpoint. If the run is killed before, the same command starts it again
instead of resuming an earlier one.
"""

import json
from pathlib import Path
from typing import NamedTuple

from spider import files
from spider.errors import CheckpointError
from spider.files import is_count


class StartedOver(NamedTuple):
    """The start of a run that started over or went back to an earlier checkpoint."""
    lineage: int
    origin: str                           # the checkpoint, an absolute path
    reset_steps: bool


def note_path(directory: Path) -> Path:
    """Return the path of the note in a run's directory."""
    return directory / "started-over.json"


def read_note(directory: Path) -> StartedOver | None:
    """Read a directory's note, or return None; raise CheckpointError if it is damaged."""
    try:
        note = StartedOver(**json.loads(note_path(directory).read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        note = None
    if note is None or not (is_count(note.lineage) and type(note.origin) is str and type(note.reset_steps) is bool):
        raise CheckpointError(f"{note_path(directory)}: damaged: delete it to resume from the newest checkpoint")
    return note


def write_note(directory: Path, lineage: int, origin: Path, reset_steps: bool):
    """Write a directory's note, durably."""
    with files.durable(note_path(directory)) as file:
        json.dump(StartedOver(lineage, str(origin.resolve()), reset_steps)._asdict(), file)
