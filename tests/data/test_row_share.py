"""The rows of one process of several, for work that needs no batches of one shape."""

import numpy as np

from tfx_jax.data.epochs import RowList, RowShare


def test_processes_share_every_row_once_with_its_length():
    lengths = [3, 1, 2, 5, 4]
    rows = RowList([{"tokens": np.full(length, number)} for number, length in enumerate(lengths)])
    held = []
    for share in (RowShare(rows, index, 3) for index in range(3)):
        found = [share[place]["tokens"] for place in range(len(share))]
        assert [len(tokens) for tokens in found] == share.lengths.tolist()
        held += [int(tokens[0]) for tokens in found]
    assert sorted(held) == list(range(5))
