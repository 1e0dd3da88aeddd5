"""Spider, a byte-level Recurrent-Depth Transformer. CHANGELOG.md has what each version changed."""

import sys
import warnings

if sys.version_info < (3, 11):  # noqa: UP036 a checkout runs without pip, which would refuse
    print(
        f"Spider needs Python 3.11 or newer, and {sys.executable} is older: make an environment by "
        f"a newer one (python3.11 -m venv), and pip install -e . there",
        file=sys.stderr,
    )
    sys.exit(2)

from spider.threads import idle_threads_spin, set_threads

__version__ = "0.1.0"

if "torch" not in sys.modules:
    set_threads()
elif sys.modules["torch"].get_num_threads() > 1 and idle_threads_spin():
    warnings.warn(
        "torch was imported before spider: its idle threads spin, so that beside other programs a "
        "step may take many times as long. Import spider first; in a notebook restart the kernel",
        stacklevel=2,
    )
