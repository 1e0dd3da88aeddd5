"""Spider, a byte-level Recurrent-Depth Transformer. CHANGELOG.md has what each version changed."""

__version__ = "0.1.0"
