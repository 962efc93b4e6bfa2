"""Whole runs on models with encoders of images: text is trained, and the whole checkpoint is exported."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import torch
import transformers

from ropewalk import RopewalkError, load_model
from ropewalk.models import adapter as adapter_module
from ropewalk.models.config.auto_class import auto_class
from ropewalk.models.config.file import read_model_config
from ropewalk.training.preflight import announcement, resolve
from tests.marks import slow_after
from tests.models.multimodal import (
    FAMILIES,
    FILES,
    assert_same_beside_decoder,
    is_decoder,
    plain_decoder,
    save_whole,
    tensors_of,
)
from tests.training.resume_cases import metrics_of, recipe_of, weights_of
from tests.training.run_cases import cut_off_after, extend, extended

CONTEXT = 512


def values_of(folder, documents, output, family, **changed):
    """A recipe of two steps at twice the trained length, as plain values."""
    # In Llama 4 only layers with chunks have RoPE, so that no base limits the context.
    rope = {"method": "default"} if family == "llama4" else {"method": "theta", "rope_theta": 1e6}
    return {
        "model": str(folder),
        "output": str(output),
        "data": {"sources": [str(documents)], "validation_documents": 20},
        "stages": [{"context": CONTEXT, "steps": 2, "rows_per_step": 1, "learning_rate": 1e-2, "rope": rope}],
        "checkpoints": {"every": 1, "keep": 2},
        "evaluation": {"suites": ["perplexity"], "rows": 1},
        **changed,
    }


@pytest.mark.parametrize("family", slow_after(2, FAMILIES))
def test_a_run_trains_the_decoder_and_exports_the_whole_checkpoint(family, tiny_documents, tmp_path):
    """It is interrupted and resumed, and gives the bytes of one that was not."""
    folder = save_whole(tmp_path / "model", family)
    unbroken = values_of(folder, tiny_documents, tmp_path / "unbroken", family)
    resumed = {**unbroken, "output": str(tmp_path / "resumed")}
    summary = extend(recipe_of(unbroken))
    with cut_off_after(1):
        extend(recipe_of(resumed))
    again = extend(recipe_of(resumed), resume=True)
    assert metrics_of(resumed["output"]) == metrics_of(unbroken["output"])
    assert weights_of(resumed["output"]) == weights_of(unbroken["output"])
    assert [each["score"] for each in again["after"]] == [each["score"] for each in summary["after"]]

    model = Path(again["model"])
    assert_same_beside_decoder(folder, model)
    assert_same_beside_decoder(folder, tmp_path / "resumed" / "checkpoints" / "stage0-step000002")
    old, new = tensors_of(folder), tensors_of(model)
    matrices = [name for name in new if is_decoder(name) and new[name].dim() > 1 and old[name].any()]
    assert all(not torch.equal(old[name], new[name]) for name in matrices)
    for name, content in FILES.items():
        assert (model / name).read_bytes() == content
    config = read_model_config(str(model))
    base = read_model_config(str(folder)).full_attention_rope.rope_theta if family == "llama4" else 1e6
    assert (config.full_attention_rope.rope_theta, config.max_position_embeddings) == (base, CONTEXT)

    ids = torch.randint(0, 15, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = plain_decoder(model, torch.float32)(ids, use_cache=False).logits
        ours = load_model(model)(ids, use_cache=False).logits
    # Angles of up to 64 rad that are rounded to float32 and not, through a few layers of float32.
    assert float((ours - theirs).abs().max()) <= 2**-10 * float(theirs.abs().max())


def test_a_run_says_that_encoders_are_kept(tiny_documents, tmp_path):
    folder = save_whole(tmp_path / "model", "qwen3_vl")
    resolved = resolve(recipe_of(values_of(folder, tiny_documents, tmp_path / "run", "qwen3_vl")))
    assert any(
        "only the language model of qwen3_vl runs and changes" in line for line in announcement(resolved)
    )


@pytest.mark.parametrize("method", ["linear", "llama3"])
def test_a_method_that_would_move_images_is_refused_before_anything_is_written(
    method, tiny_documents, tmp_path
):
    folder = save_whole(tmp_path / "model", "qwen3_vl")
    values = values_of(folder, tiny_documents, tmp_path / "run", "qwen3_vl")
    values["stages"][0]["rope"] = {"method": method, "factor": 2.0}
    if method == "llama3":
        values["stages"][0]["rope"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    with pytest.raises(RopewalkError, match=f"RoPE of type {method} would change positions in images"):
        extend(recipe_of(values))
    assert not (tmp_path / "run" / "model").exists()


def lora_modules(model):
    return [name for name, _ in model.named_modules() if name.endswith("lora_A")]


def adapted(folder, adapter):
    """The whole model with the adapter, as plain transformers and peft load them."""
    config = transformers.AutoConfig.from_pretrained(adapter)
    base = auto_class(config).from_pretrained(folder, config=config, dtype=torch.float32)
    with warnings.catch_warnings():
        # peft 0.21 asks transformers 5.23 for an attribute under its old name.
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(base, adapter).eval()


def test_an_adapter_is_trained_in_the_decoder_alone(tiny_documents, tmp_path, monkeypatch):
    """Gemma's encoder has layers of the same names as its decoder; plain peft leaves them alone too."""
    folder = save_whole(tmp_path / "model", "gemma3")
    lora = {"adapter": {"rank": 2, "alpha": 4, "targets": ["attention"], "also_train": ["norms"]}}
    values = values_of(folder, tiny_documents, tmp_path / "run", "gemma3", **lora)
    summary = extend(recipe_of(values))
    model, adapter = Path(summary["model"]), Path(summary["adapter"])
    assert_same_beside_decoder(folder, model)
    whole = adapted(folder, adapter)
    # Four linear layers in each of six layers.
    assert len(lora_modules(whole)) == 24
    assert all(".language_model.layers." in name for name in lora_modules(whole))
    ids = torch.randint(0, 15, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = (
            each(ids, use_cache=False).logits for each in (whole, plain_decoder(model, torch.float32))
        )
        before = plain_decoder(folder, torch.float32)(ids, use_cache=False).logits
    assert float((found - expected).abs().max()) <= 2**-16 * float(expected.abs().max())
    assert float((found - before).abs().max()) > 2**-10 * float(expected.abs().max())

    # With short names, as of a model without encoders, peft would find layers of the encoder too.
    monkeypatch.setattr(adapter_module, "has_set_aside", lambda model: False)
    values["adapter"]["also_train"] = []
    summary = extend(recipe_of({**values, "output": str(tmp_path / "wrong")}))
    assert any("vision_tower" in name for name in lora_modules(adapted(folder, Path(summary["adapter"]))))


@pytest.mark.slow
def test_two_ranks_export_what_one_process_exports(two_ranks, tiny_documents, tmp_path):
    folder = save_whole(tmp_path / "model", "qwen3_vl")
    values = values_of(folder, tiny_documents, tmp_path / "alone", "qwen3_vl")
    values["stages"][0]["rows_per_step"] = 2
    alone = extend(recipe_of(values))
    ranks = {"output": str(tmp_path / "together"), "parallel": {"shard": 2}}
    together, _ = two_ranks.run(extended, {**values, **ranks})
    model = Path(together["model"])
    assert_same_beside_decoder(folder, model)
    assert json.loads((model / "config.json").read_text()) == json.loads(
        (Path(alone["model"]) / "config.json").read_text()
    )
    assert tensors_of(model).keys() == tensors_of(Path(alone["model"])).keys()
    for mine, one in zip(metrics_of(tmp_path / "together"), metrics_of(tmp_path / "alone"), strict=True):
        assert mine[2] == pytest.approx(one[2], rel=1e-5)
