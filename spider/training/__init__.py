"""Training: what train.py does around a step, from the plan of a run to its checkpoints."""
