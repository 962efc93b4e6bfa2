"""A model under test: what it states, how it is read, and who makes the prompts."""

from typing import Any

import pytest

from ropewalk.evaluation import ModelUnderTest
from ropewalk.evaluation.backends.likelihoods import InMemoryLikelihoods
from ropewalk.evaluation.model_under_test import stated_length
from tests.evaluation.evaluation_cases import tiny_llama, word_tokenizer


def test_a_model_in_memory_states_its_length_and_is_read_in_its_own_chunks(model: Any) -> None:
    tokenizer = word_tokenizer()
    under_test = ModelUnderTest.in_memory(model, tokenizer, batch_size=3, prefill_chunk=16)
    assert under_test.max_position_embeddings == model.config.max_position_embeddings
    assert isinstance(under_test.likelihoods, InMemoryLikelihoods)
    assert under_test.likelihoods.model is model
    assert under_test.likelihoods.prefill_chunk == 16
    # A sequence of one chunk is read whole.
    assert [under_test.chunk_for(length) for length in (1, 16, 17)] == [None, None, 16]
    readers = [under_test.window_reader(length) for length in (16, 17)]
    assert [reader.prefill_chunk for reader in readers] == [None, 16]
    assert {reader.bos_id for reader in readers} == {tokenizer.bos_token_id}
    # The head is made once, whoever asks.
    assert readers[0].head is readers[1].head is under_test.head


def test_behind_a_server_there_are_no_likelihoods() -> None:
    assert ModelUnderTest(word_tokenizer(), backend=None).likelihoods is None


def test_a_sharded_model_has_the_likelihoods_of_its_ranks() -> None:
    ranks = object()
    under_test = ModelUnderTest(word_tokenizer(), backend=None, sharded=True, over_ranks=ranks)
    assert under_test.likelihoods is ranks


def test_without_processes_every_caller_makes_its_own_prompts() -> None:
    class OnRank0:
        def on_rank_0(self, function: Any) -> str:
            return f"from rank 0: {function()}"

    tokenizer = word_tokenizer()
    assert ModelUnderTest(tokenizer, None).on_rank_0(lambda: "made") == "made"
    assert ModelUnderTest(tokenizer, None, world=OnRank0()).on_rank_0(lambda: "made") == "from rank 0: made"


@pytest.mark.parametrize("length", [32, 4096])
def test_the_length_is_what_the_config_states(length: int) -> None:
    model = tiny_llama()
    model.config.max_position_embeddings = length
    assert stated_length(model) == length
