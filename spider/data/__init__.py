"""Data: turn texts into shards, and read the shards of a directory."""
