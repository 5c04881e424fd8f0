"""Batches: order, padding by position, labels where the loss is."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from torch.nn.functional import cross_entropy

from lazytrain.jobs.data import IGNORED, Rows, batches, collate, pad_id, worst_batch


def rows_of(*lengths: int) -> Rows:
    rows = Rows()
    for i, length in enumerate(lengths):
        rows.append(list(range(100 * i, 100 * i + length)), 2, f"prompt {i}", f"answer {i}")
    return rows


def firsts(rows: Rows, **options) -> list[list[int]]:
    """First token of each row, batch by batch: which rows went where."""
    return [batch.input_ids[:, 0].tolist() for batch in batches(rows, pad_id=0, **options)]


def test_a_batch() -> None:
    rows = Rows()
    rows.append([5, 6, 7, 9], 2, "", "")
    rows.append([5, 9], 1, "", "")
    batch = collate(rows, [1, 0], pad_id=9)
    assert batch.input_ids.tolist() == [[5, 9, 9, 9], [5, 6, 7, 9]]
    assert batch.attention_mask.tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch.labels.tolist() == [[IGNORED, 9, IGNORED, IGNORED], [IGNORED, IGNORED, 7, 9]]
    assert {tensor.dtype for tensor in (batch.input_ids, batch.attention_mask, batch.labels)} == {torch.int64}
    assert (batch.tokens, batch.supervised) == (6, 3)


@pytest.mark.parametrize("padding", [0, 1, 9])
def test_labels_do_not_depend_on_the_padding_id(padding: int) -> None:
    rows = rows_of(3, 7)
    assert torch.equal(collate(rows, [0, 1], padding).labels, collate(rows, [0, 1], 4).labels)


def test_labels_are_unshifted() -> None:
    """The first token of the answer is in the loss: with 1 nat there and 0 at the second, the mean is 0.5."""
    rows = Rows()
    rows.append([0, 1, 2, 3, 4], 3, "", "")
    labels = collate(rows, [0], 0).labels
    log_probabilities = torch.zeros(1, 5, 2) - 50.0
    hit = torch.tensor([0.0, 0.0, -1.0, 0.0, 0.0])
    target = torch.zeros(1, 5, dtype=torch.int64).masked_fill(labels == IGNORED, IGNORED)
    log_probabilities[0, :, 0] = hit
    log_probabilities[0, :, 1] = torch.log1p(-hit.exp() + 1e-30)
    loss = cross_entropy(log_probabilities[:, :-1].flatten(0, 1), target[:, 1:].flatten())
    assert loss.item() == pytest.approx(0.5, abs=1e-4)


class TestOrder:
    def test_every_row_once_an_epoch(self) -> None:
        got = firsts(rows_of(*[3] * 10), batch=4, seed=0, epoch=0)
        assert [len(batch) for batch in got] == [4, 4, 2]
        assert sorted(chain(*got)) == [100 * i for i in range(10)]

    def test_depends_on_seed_and_epoch_alone(self) -> None:
        rows = rows_of(*[3] * 50)
        once = firsts(rows, batch=8, seed=1, epoch=2)
        torch.manual_seed(5)
        assert firsts(rows, batch=8, seed=1, epoch=2) == once
        assert [*chain(*firsts(rows, batch=5, seed=1, epoch=2))] == [*chain(*once)]
        assert firsts(rows, batch=8, seed=1, epoch=3) != once
        assert firsts(rows, batch=8, seed=2, epoch=2) != once

    def test_is_the_same_everywhere(self) -> None:
        """A resumed run on another machine goes on with the rows that are left."""
        assert firsts(rows_of(*[3] * 6), batch=6, seed=42, epoch=0) == [[400, 200, 100, 500, 0, 300]]

    def test_drop_last_and_skip(self) -> None:
        rows = rows_of(*[3] * 10)
        whole = firsts(rows, batch=4, seed=0, epoch=0)
        assert firsts(rows, batch=4, seed=0, epoch=0, drop_last=True) == whole[:2]
        assert firsts(rows, batch=4, seed=0, epoch=0, skip=1) == whole[1:]
        assert firsts(rows, batch=4, seed=0, epoch=0, skip=3) == []
        assert firsts(rows, batch=20, seed=0, epoch=0, drop_last=True) == []


def test_worst_batch_holds_the_longest_rows() -> None:
    rows = rows_of(3, 9, 4, 8)
    batch = worst_batch(rows, 2)
    assert batch.attention_mask.sum(1).tolist() == [9, 8]
    assert worst_batch(rows, 6).input_ids.shape == (6, 9)
    assert worst_batch(rows, 6).tokens == 9 + 8 + 4 + 3 + 9 + 8
    with pytest.raises(ValueError, match="no rows"):
        worst_batch(Rows(), 1)


def test_pad_id(make_tokenizer) -> None:
    assert pad_id(make_tokenizer(pad_token="<s>")) == 0
    assert pad_id(make_tokenizer()) == 1
    assert pad_id(object()) == 0
