"""Kernels of recurrent layers get the boundaries of runs; held by stand-ins, because the real ones need a GPU."""

import inspect
import sys

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.models.attention.kernels import (
    FUNCTIONS,
    KEYWORDS,
    SINCE,
    Kernel,
    boundary_keywords,
    functions_replaced_by,
    in_dry_run,
    kernel_packages,
    kernel_parameters,
    missing_kernels,
    played,
)
from ropewalk.models.attention.recurrent import mixers_of
from ropewalk.models.config.layers import LIGHTNING, MIXERS, SHORT_CONVOLUTION
from ropewalk.models.config.model import ModelConfig
from tests.marks import slow_after
from tests.models import every_family
from tests.models.attention import standin_kernels
from tests.models.attention.test_recurrent import LENGTHS, ROUNDING, attached, compare
from tests.models.families import HYBRIDS, tiny_model
from tests.versions import needs_transformers, pretend_transformers

WITHOUT = {"minimax"}
"""Families whose recurrence has no kernel in transformers."""
LATER = {"lfm3": "5.24"}
"""Families whose mixer calls kernels only from a later version on."""
FAMILIES = [family for family in HYBRIDS if family not in WITHOUT]


@pytest.fixture(autouse=True)
def _newest(request):
    family = getattr(request.node, "callspec", None) and request.node.callspec.params.get("family")
    needs_transformers(LATER.get(family, SINCE), "a mixer that passes boundaries on")


def mixer_of(model):
    return mixers_of(model, ModelConfig.of(model.config))[0]


def recurrence_of(model):
    return ModelConfig.of(model.config).mixer.recurrence


def functions_of(model):
    return FUNCTIONS.get(recurrence_of(model), {})


@pytest.mark.parametrize("pattern", slow_after(1, ["anchor", "intra_document"]))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_each_document_alone(family, pattern, monkeypatch):
    """Outputs and gradients; every kernel gets one row without padding, and where its runs start."""
    plain = tiny_model(family, torch.float64, sharp=True)
    calls = standin_kernels.install(monkeypatch, type(mixer_of(plain)))
    layout = PackedLayout.from_lengths(LENGTHS, pattern, int(pattern == "anchor"), "reset")
    errors = compare(plain, layout)
    assert max(errors) <= ROUNDING
    anchor = [layout.anchor_length] if layout.anchor_length else []
    runs = torch.tensor([*anchor, *LENGTHS])
    idx = torch.arange(len(runs), dtype=torch.int32).repeat_interleave(runs)[None]
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), runs.cumsum(0)])
    given = [call for call in calls if call[1].keys() & {"seq_idx", "cu_seqlens"}]
    # The kernels that evaluation calls, once in each recurrent layer; the other calls are the documents alone.
    mixers = len(mixers_of(plain, ModelConfig.of(plain.config)))
    called = [name for name in functions_of(plain) if "split" not in name]
    assert [name for name, _ in given] == [standin_kernels.PACKAGES[name][1] for name in called] * mixers
    for _, arguments in given:
        if "seq_idx" in arguments:
            assert torch.equal(arguments["seq_idx"], idx)
        else:
            assert torch.equal(arguments["cu_seqlens"], ends)


@pytest.mark.parametrize("family", ["granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"])
def test_the_fused_kernel_of_training_gets_the_boundaries(family, monkeypatch):
    """Only training calls it. Without kernels the same row goes through transformers' torch code, run by run."""
    plain = tiny_model(family, torch.float64, sharp=True).train()
    layout = PackedLayout.from_segments([9, 33, 4, 7, 12], [1, 0, 2, 1, 0], "anchor", 2)
    ids = torch.randint(3, 90, (1, layout.total_length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = attached(plain)(input_ids=ids, layout=layout).logits
        calls = standin_kernels.install(monkeypatch, type(mixer_of(plain)))
        fused = attached(plain)(input_ids=ids, layout=layout).logits
    names = {name for name, _ in calls}
    assert names == {"mamba_split_conv1d_scan_combined"}
    assert all(len(arguments["seq_idx"][0].unique()) == 4 for _, arguments in calls)
    assert float((fused - expected).abs().max()) <= ROUNDING * float(expected.abs().max())


def test_rows_of_a_batch_become_one_row(monkeypatch):
    plain = tiny_model("qwen3_next", torch.float64, sharp=True)
    layouts = [
        PackedLayout.from_lengths([10, 30, 19], "anchor"),
        PackedLayout.from_segments([21, 5, 34], [1, 0, 1], "intra_document", 0),
    ]
    ids = torch.randint(3, 90, (2, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = attached(plain)(input_ids=ids, layout=layouts).logits
        calls = standin_kernels.install(monkeypatch, type(mixer_of(plain)))
        packed = attached(plain)(input_ids=ids, layout=layouts).logits
    assert float((packed - expected).abs().max()) <= ROUNDING * float(expected.abs().max())
    assert calls[1][1]["cu_seqlens"].tolist() == [0, 1, 11, 41, 60, 65, 120]


@pytest.mark.parametrize("family", FAMILIES)
def test_one_function_without_a_kernel_means_padded_batches(family, monkeypatch):
    """transformers' torch code raises an error when it is given boundaries."""
    plain = tiny_model(family, sharp=True)
    functions = functions_of(plain)
    layout = PackedLayout.from_lengths(LENGTHS, "intra_document", 0, "reset")
    ids = torch.ones(1, layout.total_length, dtype=torch.long)
    for missing in functions:
        with monkeypatch.context() as some:
            mixer = mixer_of(plain)
            calls = standin_kernels.install(
                some, type(mixer), [name for name in functions if name != missing]
            )
            assert boundary_keywords(mixer, recurrence_of(plain)) is None
            attached(plain)(input_ids=ids, layout=layout)
            assert not any(arguments.keys() & {"seq_idx", "cu_seqlens"} for _, arguments in calls)


def test_a_kernel_that_takes_no_boundaries_means_padded_batches(monkeypatch):
    """transformers would drop the argument, and the row would be one run."""

    def causal_conv1d_fn(x, weight, bias=None, activation=None):
        raise AssertionError

    mixer = mixer_of(tiny_model("lfm2", sharp=True))
    with monkeypatch.context() as some:
        standin_kernels.install(some, type(mixer))
        assert boundary_keywords(mixer, SHORT_CONVOLUTION) == {"seq_idx": "seq_idx"}
    standin_kernels.install(monkeypatch, type(mixer), causal_conv1d_fn=causal_conv1d_fn)
    replaced = sys.modules[type(mixer).__module__].causal_conv1d_fn
    assert kernel_parameters(replaced) == ("x", "weight", "bias", "activation")
    assert boundary_keywords(mixer, SHORT_CONVOLUTION) is None


def test_an_older_transformers_means_padded_batches(monkeypatch):
    mixer = mixer_of(tiny_model("lfm2", sharp=True))
    standin_kernels.install(monkeypatch, type(mixer))
    assert boundary_keywords(mixer, SHORT_CONVOLUTION) is not None
    pretend_transformers(monkeypatch, "5.22.9")
    assert boundary_keywords(mixer, SHORT_CONVOLUTION) is None


@pytest.mark.parametrize("family", sorted(HYBRIDS))
def test_the_table_has_every_function_that_transformers_can_replace(family):
    """Compares with transformers' source, so a mixer that calls its kernels in another way is noticed."""
    mixer = mixer_of(tiny_model(family, sharp=True))
    module = sys.modules[type(mixer).__module__]
    source = inspect.getsource(type(mixer).forward)
    replaceable = {
        name
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and "is_new_implementation" in inspect.getclosurevars(function).nonlocals
        and f"{name}(" in source
    }
    # Functions for one token and a cached state: no packed row has a cache.
    steps = {name for name in replaceable if name.endswith("_update") or "recurrent" in name}
    functions = functions_of(tiny_model(family, sharp=True))
    assert replaceable - steps == set(functions)
    for name in functions:
        call = source.split(f" {name}(")[-1]
        keyword = KEYWORDS.get(name)
        passed = f'cu_seqlens=kwargs.pop("{keyword}", None)' if keyword else "**kwargs"
        # The fused kernel gets them with its other options.
        assert passed in call.split("\n            )\n")[0] or "**fused_kwargs" in call, name


def test_every_recurrence_is_decided():
    assert set(FUNCTIONS) == {mixer.recurrence for mixer in MIXERS.values()} - {LIGHTNING}
    assert kernel_parameters(None) == ()


PACKAGES_OF = {
    "qwen3_next": ("causal-conv1d", "flash-linear-attention"),
    "kimi_linear": ("causal-conv1d", "flash-linear-attention"),
    "bamba": ("causal-conv1d", "mamba-ssm"),
    "lfm2": ("causal-conv1d",),
    "minimax": (),
    "llama": (),
}


@pytest.mark.parametrize("family", PACKAGES_OF)
def test_packages_of_a_family_are_missing_until_each_of_its_functions_is_a_kernel(family, monkeypatch):
    model = tiny_model(family, sharp=family in HYBRIDS)
    config = ModelConfig.of(model.config)
    assert kernel_packages(config) == missing_kernels(config) == PACKAGES_OF[family]
    if PACKAGES_OF[family]:
        standin_kernels.install(monkeypatch, type(mixer_of(model)), ["causal_conv1d_fn"])
        assert missing_kernels(config) == PACKAGES_OF[family][1:]
        standin_kernels.install(monkeypatch, type(mixer_of(model)))
        assert missing_kernels(config) == ()


def test_a_played_kernel_drops_arguments_that_it_lacks():
    kernel = Kernel(lambda x, scale=1: x * scale)
    assert kernel(2, scale=3, cu_seqlens=None) == 6
    assert kernel_parameters(kernel) == ("x", "scale")


def test_functions_are_played_within_the_context_alone():
    def replacing(name, function, chunk, module):
        return name, function, chunk, module

    assert played("some", len) is len
    with functions_replaced_by(replacing):
        assert in_dry_run()
        assert played("some", len, 8) == ("some", len, 8, None)
    assert not in_dry_run()


def test_kernels_of_a_decoder_of_another_family_are_missing_too():
    """transformers has LFM2-VL's class in a module of its own, without the functions of LFM2's layers."""
    config = ModelConfig.of(every_family.tiny_config("lfm2_vl"))
    assert missing_kernels(config) == kernel_packages(config) == ("causal-conv1d",)
