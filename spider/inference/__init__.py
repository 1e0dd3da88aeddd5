"""Inference: load a checkpoint, talk to it, score texts, look inside, export it."""
