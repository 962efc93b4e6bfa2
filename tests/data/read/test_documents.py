"""Documents are known by a hash of their text or tokens, the same on every machine."""

import numpy as np

from ropewalk.data.read.documents import text_hash, token_hash


def test_the_hash_is_the_same_on_every_machine() -> None:
    # printf größer | b2sum -l 64
    assert text_hash("größer") == 0x1605D72E4CE63BAE


def test_a_hash_of_token_ids_is_of_their_numbers_and_not_of_how_they_lie() -> None:
    ids = np.array([1, 2, 300], np.int32)
    assert token_hash(ids) == text_hash("\1\0\0\0\2\0\0\0\x2c\1\0\0")
    assert token_hash(np.array([1, 0, 2, 0, 300, 0], np.int32)[::2]) == token_hash(ids)
    assert token_hash(ids.astype(">i4")) == token_hash(ids)
    assert len({token_hash(ids), token_hash(ids[::-1]), token_hash(ids[:2])}) == 3
