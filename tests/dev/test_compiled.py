"""A step compiled without a GPU: layers become one graph each, and nothing breaks them."""

import pytest

import bench
from spider.dev.absent_gpu import in_child

ONE_VISIT = ["--precision", "bf16", "--seq_len", "64", "--micro_batch", "16", "--n_loops", "1", "--set",
             "n_recurrent_layers=1,n_prelude_layers=1,n_coda_layers=0,engram_layers=0"]


@pytest.mark.rehearsal
def test_a_byte_layer_and_a_visit_become_a_graph_forward_and_one_backward():
    tables = in_child(bench.compiled_step, "h200", ONE_VISIT)
    assert [row["graph"] for row in tables["graphs"]] == ["forward", "backward"] * 2
    assert all(row["kernels"] > 10 and row["MB moved"] > 0 for row in tables["graphs"])
    assert tables["compilation"][-1]["graphs made"] == 0 and tables["graph breaks"] == [{"graph break": "none"}]
    assert tables["a step"][-1]["number"] == sum(row["number"] for row in tables["a step"][:-1])
