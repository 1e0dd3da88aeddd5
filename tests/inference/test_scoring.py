"""Windows of a text that is scored."""

import numpy as np
import pytest

from spider.data import shards
from spider.inference.scoring import windows
from tokenizer import BOS_ID


@pytest.mark.parametrize("seq_len", (2, 7, 16, 64))
@pytest.mark.parametrize("length", (1, 2, 7, 8, 9, 50, 250))
def test_windows_hold_every_byte_once_behind_half_a_window_or_all_that_there_is(seq_len, length):
    stream = shards.Stream([shards.Shard("memory", np.array([BOS_ID, *range(length)], np.uint16))])
    for batch in (1, 3, 1000):
        batches, size = windows(stream, seq_len, batch)
        seen, ids_read = [], 0
        for ids, labels in batches:
            assert len(ids) <= batch
            ids_read += ids.numel()
            for row, place in (labels != -100).nonzero().tolist():
                seen.append(byte := int(labels[row, place]))
                assert ids[row, place] == (byte - 1 if byte else BOS_ID) and place >= min(byte, seq_len // 2)
        assert sorted(seen) == list(range(length)) and ids_read == size
