"""Models of the rehearsal, and the peak memory of their steps on fake tensors, which test_costs.py
measures."""

# Presets with their own widths, but one layer of each kind and few loops.
LAYERS = "n_prelude_layers=1,n_coda_layers=1,n_recurrent_layers=2,engram_layers=1"
MODELS = {
    "1b": f"--set={LAYERS} --n_loops=2",
    "base": "--set=n_prelude_layers=1,n_coda_layers=1 --n_loops=1",
    "original": f"--set={LAYERS} --n_loops=2",
}
BATCH = "--seq_len=2048 --micro_batch=64"  # large, so that activations take most of the memory
# GB by preset and precision, for --recompute nothing, core, all
PEAKS = {
    ("1b", "bf16"): (40.5, 33.9, 22.4),
    ("1b", "fp8"): (44.6, 37.9, 29.4),
    ("base", "bf16"): (34.4, 32.6, 21.3),
    ("base", "fp8"): (38.6, 36.8, 28.3),
    ("original", "bf16"): (43.9, 33.8, 23.3),
    ("original", "fp8"): (49.1, 38.9, 30.3),
}
