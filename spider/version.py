"""The commit of this checkout."""

import subprocess
from pathlib import Path


def commit() -> str:
    return subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True,
                          cwd=Path(__file__).parent).stdout.strip()
