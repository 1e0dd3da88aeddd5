"""Bytes that ranks send in a step, beside the formula."""

import json
import os
import subprocess
import sys

import pytest
from training.jobs import LIMIT

from conftest import ROOT, SMALL


@pytest.mark.slow
@pytest.mark.parametrize("boundaries", ("flexitokens", "learned"))
def test_ranks_send_as_much_as_the_formula_predicts(tmp_path, boundaries):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
                           "bench.py", "--only", "traffic", "--model", "tiny", "--device", "cpu", "--set",
                           SMALL.replace("flexitokens", boundaries), "--seq_len", "32", "--micro_batch", "2",
                           "--out", str(tmp_path)], cwd=ROOT, timeout=LIMIT, capture_output=True, text=True,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "bench-cpu.json").read_text())["traffic, counted"]
    assert [(row["shards"], row["micro-steps"], row["precision"]) for row in rows] == [
        (1, 1, "fp32"), (1, 3, "fp32"), (2, 1, "fp32"), (2, 1, "bf16"), (2, 3, "fp32"), (2, 3, "bf16")]
    for row in rows:
        assert row["MB sent"] == pytest.approx(row["by the formula"], rel=0.01), row
    assert rows[3]["MB sent"] < rows[2]["MB sent"] and rows[5]["MB sent"] < rows[4]["MB sent"]
