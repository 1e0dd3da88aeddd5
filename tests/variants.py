"""Variants of the small model, with components left out, added or changed. The invariants of the
model hold for all."""

VARIANTS = {
    "everything": {},
    "words": dict(boundaries="words"),
    "learned boundaries": dict(boundaries="learned"),
    "segment offsets": dict(segment_offsets=4, boundaries="words"),
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
}
