"""Checkpoints of one process and of ranks, and what they must agree on."""

import threading

import pytest
import torch

from ropewalk.training.checkpoint.background import CheckpointWriter
from ropewalk.training.checkpoint.files import Position

MESH = {"shard": 2, "sequence": 2}
POSITION = Position(0, 2, 999)
NAME = "stage0-step000002"


def assert_same_tensors(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def assert_same_losses(found, expected):
    """Float32 sums over other shards differ by their order: some units in the last place, as in test_sharded_step."""
    for (loss, norm), (loss1, norm1) in zip(found, expected, strict=True):
        assert loss == pytest.approx(loss1, rel=1e-6)
        assert norm == pytest.approx(norm1, rel=1e-5)


def held_back(monkeypatch):
    """An event without which no checkpoint is written in the background; set at first."""
    event, write = threading.Event(), CheckpointWriter._write_copy
    event.set()

    def late(*arguments):
        assert event.wait(60)
        write(*arguments)

    monkeypatch.setattr(CheckpointWriter, "_write_copy", late)
    return event
