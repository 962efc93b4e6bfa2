"""The cache in a call has another name since transformers 5.24; all of its names are read, and models take ours."""

import pytest
import torch
import transformers

from ropewalk.models.attention.kv_cache import NAMES, cache_argument, cache_in, cache_of, present_name


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_read(name):
    cache = transformers.DynamicCache()
    assert cache_in({"use_cache": True, name: cache}) is cache
    assert cache_in({name: None}) is None


# An argument under a name that a model does not know would go unread, and a deprecated one warns.
@pytest.mark.filterwarnings("error")
def test_a_model_fills_the_cache_that_it_is_given_and_returns_it(model):
    cache = transformers.DynamicCache()
    output = model(torch.tensor([[1, 2, 3]]), **cache_argument(cache), use_cache=True)
    assert cache.get_seq_length() == 3
    assert cache_of(output) is cache
    assert cache_of(model(torch.tensor([[1]]), use_cache=False)) is None


def test_earlier_names_of_an_output_are_not_read_since_transformers_warns_of_them():
    class Output:
        def __getattr__(self, name):
            assert name == present_name()

    assert cache_of(Output()) is None
