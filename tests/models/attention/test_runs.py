"""Runs in batches: every token once, in its place, and little padding."""

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.models.attention.runs import SHORT, batches_by_length, one_row, run_batches


@pytest.mark.parametrize("pattern", ["full", "intra_document", "anchor"])
def test_every_token_is_in_one_run_and_padding_is_bounded(pattern):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(3):
        lengths = torch.randn(200, generator=generator).mul(1.2).add(5).exp().long().clamp(min=1).tolist()
        documents = torch.randint(0, 120, (200,), generator=generator).tolist()
        lengths[-1] += 120_000 - sum(lengths)
        rows.append(PackedLayout.from_segments(lengths, documents, pattern, 1))
    batches = run_batches(tuple(rows), torch.device("cpu"))
    if pattern == "full":
        assert batches is None
        return
    length = rows[0].total_length
    tokens = torch.cat([batch.tokens for batch in batches.batches])
    assert torch.equal(tokens[batches.back], torch.arange(3 * length))
    runs = set()
    for batch in batches.batches:
        entries, inside = batch.places // batch.shape[1], batch.places % batch.shape[1]
        for entry in range(batch.runs):
            mine = batch.tokens[entries == entry]
            assert torch.equal(inside[entries == entry], torch.arange(len(mine)))
            row = rows[int(mine[0]) // length]
            document = row.document_ids[mine % length]
            assert torch.equal(mine % length, torch.nonzero(row.document_ids == document[0]).flatten())
            runs.add((int(mine[0]) // length, int(document[0])))
        assert batch.lengths.tolist() == entries.bincount().tolist()
        if batch.shape[1] > SHORT:
            assert batch.runs * batch.shape[1] < 2 * len(batch.tokens)
    assert len(runs) == sum(len(row.document_lengths) + 1 for row in rows)


def test_padding_is_zero_and_is_taken_away_again():
    lengths = torch.tensor([3, 70, 1, 50])
    tokens = torch.randperm(124, generator=torch.Generator().manual_seed(1))
    x = torch.randn(124, 2)
    for gather in (batches_by_length, one_row):
        runs = gather(tokens, lengths, torch.device("cpu"))
        padded = [batch.padded(x) for batch in runs.batches]
        assert all(each.shape[:2] == batch.shape for each, batch in zip(padded, runs.batches, strict=True))
        total = sum(each.sum() for each in padded)
        # The same numbers in another order, in float32.
        assert abs(float(total - x.sum())) <= 248 * 2.0**-23 * float(x.abs().sum())
        back = [batch.unpadded(each) for batch, each in zip(runs.batches, padded, strict=True)]
        assert torch.equal(torch.cat(back).index_select(0, runs.back), x)
        numbers = torch.cat([batch.numbers for batch in runs.batches])
        assert torch.equal(numbers[runs.runs_back], torch.arange(4))
