"""Spider, a byte-level Recurrent-Depth Transformer. CHANGELOG.md has what each version changed."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 a checkout runs without pip, which would refuse
    print(
        f"Spider needs Python 3.11 or newer, and {sys.executable} is older: make an environment by "
        f"a newer one (python3.11 -m venv), and pip install -e . there",
        file=sys.stderr,
    )
    sys.exit(2)

from spider.threads import set_threads

__version__ = "0.1.0"

if "torch" not in sys.modules:
    set_threads()
