"""Spider, a byte-level Recurrent-Depth Transformer. CHANGELOG.md has what each version changed."""

import sys

from spider.threads import set_threads

__version__ = "0.1.0"

if "torch" not in sys.modules:
    set_threads()
