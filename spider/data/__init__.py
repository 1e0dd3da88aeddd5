"""Data: from texts to shards, and how the shards of a directory are read."""
