"""The ids above those of bytes, which are 0-255; tokenizer.py says what each means."""

PAD_ID = 256
BOS_ID = 257
EOS_ID = 258
VOCAB_SIZE = 272

IGNORED = -100  # a label that does not count, as in torch's cross_entropy
