"""Spider, a byte-level Recurrent-Depth Transformer. CHANGELOG.md lists the changes by version."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 pip would refuse, but a checkout runs without pip
    raise ImportError(
        f"Spider needs Python 3.11 or newer, and {sys.executable} is older: make an environment "
        f"with a newer one (python3.11 -m venv), and pip install -e . there"
    )

__version__ = "0.1.0"
