"""lm-evaluation-harness measures an exported model, from local files."""

import json

import pytest
import torch
from exporting import checkpoint, exported, model  # noqa: F401

from tokenizer import BOS_ID


def scores(tmp_path, exported, task: str, documents: list[dict], **settings) -> tuple[dict, list]:
    """Results of one task whose YAML and documents are written here, and what it logged of each document."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(one) + "\n" for one in documents))
    (tmp_path / "task.yaml").write_text(
        f"task: local\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/documents.jsonl\n"
        f"test_split: test\n{task}")
    found = simple_evaluate(
        model=HFLM(str(exported), trust_remote_code=True, device="cpu", batch_size=3, **settings), tasks=["local"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False), bootstrap_iters=0)
    return found["results"]["local"], found["samples"]["local"]


def nats(model, context: list[int], told: list[int]) -> float:
    """Nats that the model needs for ids behind a context, by the full pass."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *told]])).logits[0, len(context) - 1:-1]
    return torch.nn.functional.cross_entropy(logits, torch.tensor(told), reduction="sum").item()


def test_the_harness_counts_the_bits_that_a_local_text_takes(exported, model, tmp_path):
    texts = ["abc def gh", "é漢🕸 and some more of it, more than a window holds"]
    result, _ = scores(tmp_path, exported, """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: bits_per_byte
""", [dict(text=one) for one in texts], max_length=32)
    total = 0
    for one in texts:
        ids = list(one.encode())
        for start in range(0, len(ids), 32):  # windows apart from each other but for a byte of context
            last = start + 32 >= len(ids) and start
            context = [BOS_ID] if not start else ids[start - 1:start]
            if last:                          # the last window is a full one, whose end counts
                context = ids[len(ids) - 33:start]
            total += nats(model, context, ids[start:start + 32])
    expected = total / torch.log(torch.tensor(2.0)).item() / sum(len(one.encode()) for one in texts)
    assert result["bits_per_byte,none"] == pytest.approx(expected, rel=1e-4)


def test_the_harness_asks_which_of_several_answers_is_likeliest(exported, model, tmp_path):
    documents = [dict(question=question, choices=["abc", "hg", "d ef"], gold=1) for question in ("abc", "dd e", "f g")]
    result, logged = scores(tmp_path, exported, """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
""", documents)
    likeliest = []
    for one in sorted(logged, key=lambda one: one["doc_id"]):
        costs = [nats(model, list(one["doc"]["question"].encode()), list(f" {choice}".encode()))
                 for choice in one["doc"]["choices"]]
        assert [-found[0] for (found,) in zip(one["filtered_resps"])] == pytest.approx(costs, rel=1e-4)
        likeliest.append(costs.index(min(costs)))
    assert len(likeliest) == 3 and result["acc,none"] == pytest.approx(likeliest.count(1) / 3)

