"""Spider, a byte-level Recurrent-Depth Transformer. CHANGELOG.md has what each version changed."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 a checkout runs without pip, which would refuse
    raise ImportError(f"Spider needs Python 3.11 or newer, and {sys.executable} is older")

__version__ = "0.1.0"
