"""The ids above the bytes 0-255; tokenizer.py explains each."""

PAD_ID = 256
BOS_ID = 257
EOS_ID = 258
VOCAB_SIZE = 272

IGNORED = -100  # a label that does not count: the default of torch's cross_entropy
