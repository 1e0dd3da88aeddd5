"""Tables of train.py's flags and SpiderConfig's fields: what fails if the code ignores one.

A new flag needs a row in FLAGS; a new field must appear in a row of VARIANTS. test_flags.py and
test_config.py report a flag or field without a row.
"""

from typing import NamedTuple

import pytest


class Row(NamedTuple):
    """A flag: its values in golden runs, or "-" for the default, and its witness."""

    name: str
    golden: str  # in all golden runs that do not override it
    everything: str  # in the golden run "everything"
    # "-": a golden value differs from the default, so a golden run notices if the flag is ignored.
    # File: the test file that has a test of the flag. Flags: a run of three steps with these flags
    # differs from the run without this flag.
    witness: str


FLAGS = """
    model               -       1b          -
    data_dir            -       a:3,b:1     -
    text                -       -           test_command_line
    mock_data           -       -           test_command_line
    ckpt_dir            -       -           test_checkpoint
    target_tokens       4608    -           -
    minutes             -       -           test_resolve
    max_steps           5       -           -
    resume              -       -           test_resumption
    reset_steps         -       -           test_witnesses
    dry_run             -       -           test_estimate
    config              -       -           test_flags
    set                 -       -           golden
    n_loops             -       3           -
    random_loops        -       true        -
    seq_len             96      48          -
    micro_batch         2       -           -
    grad_accum          1       2           -
    global_batch        -       -           test_resolve
    seed                2       -           -
    target_flops        -       -           test_witnesses
    target_param_data_ratio  -  -           test_witnesses
    optimizer           -       -           test_flags
    lr                  -       -           golden
    engram_lr           0.2     -           -
    engram_reset        false   true        test_witnesses
    schedule            cosine  wsd         test_train
    warmup_steps        2       -           -
    wsd_decay_fraction  0.2     0.98        -
    min_lr_fraction     0.15    -           -
    weight_decay        0.2     -           -
    dropout             0       0.8         -
    beta1               0.85    -           -
    beta2               0.93    -           -
    momentum            0.9     -           -
    grad_clip           1       1.1         -
    max_skipped         -       -           test_train
    device              cpu     -           test_machine
    precision           fp32    -           test_flags
    fp8_experts         -       -           --precision fp8 --fp8_experts true
    moe_backend         grouped -           test_flags
    compile             off     -           test_compile
    recompute           nothing -           test_flags
    shards              -       -           test_distributed
    rank_timeout        -       -           test_distributed
    deterministic       -       -           --deterministic true
    ckpt_every          5       -           test_checkpoint
    keep_last           -       -           test_resumption
    keep_best           -       -           test_checkpoint
    eval_every          5       -           -
    eval_tokens         200     -           -
    patience            -       -           test_run
    sample_every        -       -           test_train
    sample_prompt       -       -           test_train
    log_every           -       -           --log_every 3
    run                 -       -           test_run
    profile             -       -           test_run
"""
ROWS = [Row(*line.split(maxsplit=3)) for line in FLAGS.strip().splitlines()]

# Arguments of small_config that remove, add or change components. Each change in a row has an
# effect. The model's invariants hold for all rows (test_spider_model.py, test_decode.py,
# test_initial_values.py, test_export.py).
VARIANTS = {
    "everything": {},
    "words": dict(boundaries="words"),
    "learned boundaries": dict(boundaries="learned", boundary_rate=0.25),
    "segment offsets": dict(segment_offsets=4, boundaries="words", core_loss_weight=0.2),
    "one loop": dict(n_loops=1),
    "no core": dict(n_recurrent_layers=0),
    "no prelude": dict(n_prelude_layers=0),
    "no coda": dict(n_coda_layers=0),
    "no halting": dict(act=False),
    "no adapters": dict(lora_rank=0),
    "byte window": dict(byte_window=5),
    "no experts": dict(n_routed_experts=0, n_shared_experts=3),
    "no shared expert": dict(n_shared_experts=0),
    "no segment engram": dict(engram_layers=()),
    "two segment engrams": dict(n_recurrent_layers=3, engram_layers=(2, 0)),
    "no byte tables": dict(engram_byte_contexts=()),
    "no matches": dict(engram_match_contexts=()),
    "no engram": dict(engram_byte_contexts=(), engram_match_contexts=(), engram_layers=()),
    "matches by words alone": dict(
        engram_byte_contexts=(), engram_match_contexts=("word1", "word3")
    ),
    "votes and logits": dict(
        engram_votes=4, engram_match_contexts=("1", "2", "5", "word1"), engram_logits=True
    ),
    "contexts of every kind": dict(
        engram_contexts=("2", "word1-2"),
        engram_byte_contexts=("1", "1-4", "word1", "word1-2", "above"),
        engram_match_contexts=("2-4", "word1", "word2-4", "above"),
        engram_votes=1,
        engram_vote_ages=True,
    ),
    "votes without tables": dict(engram_byte_contexts=(), engram_votes=1),
    "other numbers": dict(
        vocab_size=288,
        rope_theta=100.0,
        n_experts_per_tok=1,
        expert_bias_rate=0.1,
        aux_loss_weight=0.5,
        z_loss_weight=0.25,
        ponder_weight=0.125,
        boundary_prior=0.2,
        boundary_loss_weight=2.0,
        boundary_alpha=0.9,
        boundary_lambda=2.0,
        boundary_sigma=0.1,
        act_threshold=0.035,
    ),
}

EVERY_VARIANT = pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS.keys())

# For tests that take seconds: variants whose components other variants cover are marked slow.
SLOW = {
    "words",
    "one loop",
    "no prelude",
    "no adapters",
    "no experts",
    "no shared expert",
    "no segment engram",
    "no byte tables",
    "votes and logits",
    "votes without tables",
    "other numbers",
}
EVERY_VARIANT_IN_TIME = pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, changes in VARIANTS.items()
    ],
)
