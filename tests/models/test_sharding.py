"""A whole model on shards of its rows: what differs from one process, and where that comes from."""

import random

import pytest
import torch
import transformers

from ropewalk import EngineError, PackedLayout, RopewalkError
from ropewalk.models.load import AS_IT_IS, ModelSetup, attach, load_model
from ropewalk.models.sharding import kept_in_float32
from ropewalk.parallel import SequenceGroups, ShardedLayouts
from ropewalk.testing import random_layout
from tests.marks import slow_after
from tests.models import every_family
from tests.models.families import tiny_model
from tests.models.sharded_model_cases import (
    LONG,
    buffers_on_shards,
    dtypes_of_shards,
    head_on_shards,
    logits_on_shards,
    run_slice_by_slice,
    tiny_llama,
)


def batches():
    """Every pattern, odd lengths, documents over one to all shards, two rows of other layouts."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    found = []
    for number, pattern in enumerate(["full", "intra_document", "anchor"] * 2):
        total = rng.choice([37, 64, 101])
        layouts = [
            random_layout(total, rng, patterns=[pattern], interleaved=number > 2)
            for _ in range(1 + number % 2)
        ]
        found.append((torch.randint(0, 503, (len(layouts), total), generator=generator), layouts))
    return found


def whole_logits(model, cases):
    with torch.no_grad():
        return [model(ids, layout=layouts).logits for ids, layouts in cases]


def largest(found, expected):
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("dtype", "budget"), slow_after(1, [(torch.float32, 1e-6), (torch.float64, 1e-13)]), ids=str
)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_logits_on_four_shards_differ_by_rounding_alone(four_ranks, dtype, budget, kv_heads):
    cases = batches()
    for found in four_ranks.run(logits_on_shards, {"sequence": 4}, dtype, cases, kv_heads):
        assert largest(found, whole_logits(tiny_llama(dtype, kv_heads), cases)) < budget


@pytest.mark.parametrize("degree", [2, 4])
def test_the_rounding_is_that_of_the_same_work_in_other_shapes(two_ranks, four_ranks, degree):
    cases = batches()
    ranks = {2: two_ranks, 4: four_ranks}[degree]
    found = ranks.run(logits_on_shards, {"sequence": degree}, torch.float32, cases)[0]
    assert largest(found, whole_logits(tiny_llama(torch.float32), cases)) < 1e-6
    model = tiny_llama(torch.float32)
    run_slice_by_slice(model, degree)
    # One process that multiplies and normalises the same slices has the same bits: attention adds nothing.
    assert largest(found, whole_logits(model, cases)) == 0.0


def test_frequencies_that_depend_on_the_length_follow_the_whole_row(four_ranks):
    cases = [(ids, layouts) for ids, layouts in batches() if ids.shape[1] > 32]
    found = four_ranks.run(logits_on_shards, {"sequence": 4}, torch.float64, cases, 2, LONG)[0]
    assert largest(found, whole_logits(tiny_llama(torch.float64, 2, LONG), cases)) < 1e-13
    # The first shards end before the switch: by themselves they would have turned with the short factors.
    assert largest(found, whole_logits(tiny_llama(torch.float64), cases)) > 1e-6


def two_shards(total):
    layout = PackedLayout.from_lengths([total - 1])
    return ShardedLayouts.of([layout], SequenceGroups(sequence_group=object(), sequence=2))


def test_a_batch_that_does_not_fit_the_shards_is_refused():
    model = tiny_llama(torch.float32)
    with pytest.raises(RopewalkError, match="part of a row has 17 tokens, but the rows of the batch have 33"):
        model(torch.zeros(1, 33, dtype=torch.int64), layout=two_shards(33))


def test_stock_rope_that_depends_on_the_length_is_refused_on_shards():
    model = tiny_llama(torch.float32)
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = type(model)(type(model.config).from_dict({**model.config.to_dict(), "rope_parameters": dynamic}))
    attach(model, exact_rope=False)
    with pytest.raises(
        EngineError, match=r"dynamic.* would use the length of a shard instead of the length of the row"
    ):
        model(torch.zeros(1, 17, dtype=torch.int64), layout=two_shards(33))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_what_a_class_computes_is_as_exact_on_shards_as_in_one_process(two_ranks, tmp_path, dtype):
    """Gemma multiplies embeddings by a root that no checkpoint holds: one stored in bfloat16 does not round it."""
    tiny_model("gemma3", torch.bfloat16).save_pretrained(tmp_path)
    whole = dict(load_model(tmp_path, dtype=dtype).named_buffers())
    assert [float(factor) for factor in whole.values()] == [float(torch.tensor(32**0.5, dtype=dtype))]
    for found in two_ranks.run(buffers_on_shards, tmp_path, dtype):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], buffer) for name, buffer in whole.items())


@pytest.mark.parametrize(
    ("family", "setup"),
    [("gemma3n_text", AS_IT_IS), ("granite_swa", ModelSetup(exact_rope=False))],
)
def test_parts_of_a_model_compute_their_own_buffers_on_shards(two_ranks, tmp_path, family, setup):
    """Gemma 3n's decoder has factors of its own, and Granite with windows a rotary module for each base."""
    every_family.tiny_model(family, torch.bfloat16).save_pretrained(tmp_path)
    whole = dict(load_model(tmp_path, setup, dtype=torch.float32).named_buffers())
    assert whole
    for found in two_ranks.run(buffers_on_shards, tmp_path, torch.float32, setup):
        assert found.keys() == whole.keys()
        assert [name for name, buffer in whole.items() if not torch.equal(found[name], buffer)] == []


@pytest.mark.parametrize("family", slow_after(1, ["ernie4_5_moe", "olmo_hybrid"]))
def test_parameters_that_a_class_creates_in_float32_are_sharded_in_the_dtype_of_the_others(
    two_ranks, tmp_path, family
):
    every_family.tiny_model(family, torch.bfloat16).save_pretrained(tmp_path)
    for dtypes in two_ranks.run(dtypes_of_shards, tmp_path, torch.bfloat16):
        assert dtypes == {torch.bfloat16}


def test_what_a_checkpoint_holds_beside_its_weights_reaches_every_shard(two_ranks, tmp_path):
    """DeepSeek-V3 learns the balance of its experts in a buffer, which its class would begin with zeros."""
    model = tiny_model("deepseek_v3", sharp=True)
    held = {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    for number, buffer in enumerate(held.values(), 1):
        buffer.copy_(torch.arange(len(buffer)) / 7 + number)
    model.save_pretrained(tmp_path)
    assert held
    for found in two_ranks.run(buffers_on_shards, tmp_path, torch.float64):
        for name, buffer in held.items():
            assert torch.equal(found[name], buffer.to(found[name].dtype)), name


def test_a_head_of_its_own_reaches_every_shard_whatever_the_config_says(two_ranks, tmp_path):
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    for head, tied in two_ranks.run(head_on_shards, tmp_path):
        assert torch.equal(head, model.lm_head.weight)
        assert not tied


def test_what_transformers_keeps_in_float32_is_kept(tmp_path):
    """Private lists of names: this notices when they are kept elsewhere."""
    config = transformers.Ernie4_5_MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=0,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = {
        dtype: transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
        for dtype in (torch.float32, torch.bfloat16)
    }
    really = {name for name, p in loaded[torch.bfloat16].named_parameters() if p.dtype == torch.float32}
    kept = kept_in_float32(loaded[torch.float32], torch.bfloat16)
    assert {name for name, p in loaded[torch.float32].named_parameters() if id(p) in kept} == really
    assert really
    assert kept_in_float32(loaded[torch.float32], torch.float32) == set()
