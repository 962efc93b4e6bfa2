"""A decoder is saved as the whole checkpoint that it was read from, with another RoPE and unchanged encoders."""

import json
import shutil
from fnmatch import fnmatch

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ropewalk import RopewalkError, load_model
from ropewalk.models.checkpoint import whole as whole_module
from ropewalk.models.checkpoint.export import export
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.auto_class import name_of_class
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.read import read_config
from ropewalk.models.load import ModelSetup
from ropewalk.rope import ROPE_KEYS, Yarn
from tests.models.multimodal import (
    FAMILIES,
    FILES,
    assert_same_beside_decoder,
    is_decoder,
    plain_decoder,
    save_whole,
    tensors_of,
)

CONTEXT = 1024
CHANGED = {*ROPE_KEYS, "max_position_embeddings"}


def longer(folder):
    """The RoPE of a checkpoint for four times its length."""
    method = read_config(folder).full_attention_rope
    return Yarn(method.rotary_dim, method.rope_theta, 4.0, 256)


def extended(folder, target, tokenizer=None):
    """Save a checkpoint with another RoPE and, as after a training step, other weights."""
    model = load_model(folder, ModelSetup(longer(folder), CONTEXT))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    save_model(model, target, tokenizer)
    return model


def the_rest(stated, nested):
    """A config.json without what may change."""
    if not nested:
        return {key: value for key, value in stated.items() if key not in CHANGED}
    inner = the_rest(stated["text_config"], False)
    return {**stated, "text_config": inner}


@pytest.mark.parametrize("family", FAMILIES)
def test_names_encoders_and_files_are_those_of_the_source(family, tmp_path):
    before, after = save_whole(tmp_path / "before", family), tmp_path / "after"
    limited = json.loads((before / "tokenizer_config.json").read_text())
    (before / "tokenizer_config.json").write_text(json.dumps({**limited, "model_max_length": CONTEXT // 4}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(before)
    tokenizer.model_max_length = CONTEXT
    extended(before, after, tokenizer)
    assert_same_beside_decoder(before, after)
    old, new = tensors_of(before), tensors_of(after)
    # Exactly, and the bias of a router, which no step changes, is 0.
    assert all(torch.equal(1.5 * old[name], new[name]) for name in new if is_decoder(name))
    for name, content in FILES.items():
        assert (after / name).read_bytes() == content
    assert (after / "tokenizer.json").read_bytes() == (before / "tokenizer.json").read_bytes()
    assert transformers.AutoTokenizer.from_pretrained(after).model_max_length == CONTEXT


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_rope_and_the_length_change_in_the_config(family, tmp_path):
    before, after = save_whole(tmp_path / "before", family), tmp_path / "after"
    extended(before, after)
    old, new = (json.loads((each / "config.json").read_text()) for each in (before, after))
    # Published configs of Qwen2.5-VL have the decoder's values at the top level.
    nested = family != "qwen2_5_vl"
    assert ("text_config" in new) == nested
    assert the_rest(old, nested) == the_rest(new, nested)
    place = new["text_config"] if nested else new
    assert place["max_position_embeddings"] == CONTEXT
    read = read_model_config(str(after))
    assert (read.full_attention_rope, read.max_position_embeddings) == (longer(before), CONTEXT)
    assert (read.full_attention_rope, read.other_ropes) == (
        read_config(after).full_attention_rope,
        read_config(before).other_ropes,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_transformers_computes_what_the_model_in_memory_computes(family, tmp_path):
    before, after = save_whole(tmp_path / "before", family), tmp_path / "after"
    ours = extended(before, after)
    plain = plain_decoder(after, torch.float32)
    ids = torch.randint(3, 90, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = plain(ids, use_cache=False).logits, ours(ids, use_cache=False).logits
    # Angles of up to 40 rad that are rounded to float32 and not, through a few layers of float32.
    assert float((found - expected).abs().max()) <= 2**-10 * float(expected.abs().max())
    with torch.no_grad():
        unextended = plain_decoder(before, torch.float32)(ids, use_cache=False).logits
    assert float((found - unextended).abs().max()) > 2**-6 * float(expected.abs().max())


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_an_image_gives_what_it_gives_with_the_same_rope_in_plain_transformers(family, tmp_path):
    """The saved checkpoint against the source, with the new RoPE in its config."""
    before, after = save_whole(tmp_path / "before", family), tmp_path / "after"
    save_model(load_model(before, ModelSetup(longer(before), CONTEXT)), after)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    images = {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    loads = getattr(transformers, name_of_class(family))
    config = transformers.AutoConfig.from_pretrained(after)
    if family == "gemma3":
        # 2 x 2 patches of 8 x 8 pixels, pooled into one token.
        config.mm_tokens_per_image, config.image_token_index = 1, 7
        images["token_type_ids"] = (ids == 7).long()
    else:
        # 2 x 2 patches, merged into one token.
        config.image_token_id = 7
        patch = config.vision_config.temporal_patch_size * 3 * config.vision_config.patch_size**2
        images = {
            "pixel_values": torch.randn(4, patch, generator=torch.Generator().manual_seed(0)),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "mm_token_type_ids": (ids == 7).int(),
        }
    logits = []
    for folder in (before, after):
        model = loads.from_pretrained(folder, config=config, dtype=torch.float32).eval()
        with torch.no_grad():
            logits.append(model(input_ids=ids, **images, use_cache=False).logits)
    assert torch.equal(*logits)
    with torch.no_grad():
        images["pixel_values"] += 1
        assert not torch.equal(model(input_ids=ids, **images, use_cache=False).logits, logits[0])


@pytest.mark.parametrize(
    ("family", "name", "of_images"),
    [("gemma3", "Gemma3", "Gemma3ImageProcessor"), ("llava", "Llava", "CLIPImageProcessor")],
)
def test_a_real_processor_loads_from_the_saved_folder(family, name, of_images, tmp_path):
    """Those of the other families need torchvision."""
    before, after = save_whole(tmp_path / "before", family), tmp_path / "after"
    for file in FILES:
        (before / file).unlink()
    tokenizer = transformers.AutoTokenizer.from_pretrained(before, model_max_length=CONTEXT // 4)
    for key, token in {"boi_token": "tar", "image_token": "hemp", "eoi_token": "yarn"}.items():
        tokenizer.init_kwargs[key] = token
        setattr(tokenizer, key, token)
        setattr(tokenizer, f"{key}_id", tokenizer.convert_tokens_to_ids(token))
    made = getattr(transformers, f"{name}Processor")
    made(getattr(transformers, of_images)(), tokenizer).save_pretrained(before)
    export(before, longer(before), CONTEXT, after, transformers.AutoTokenizer.from_pretrained(before))
    old, new = (made.from_pretrained(each) for each in (before, after))
    assert (old.tokenizer.model_max_length, new.tokenizer.model_max_length) == (CONTEXT // 4, CONTEXT)
    assert new.image_processor.to_dict() == old.image_processor.to_dict()
    assert (after / "processor_config.json").read_bytes() == (before / "processor_config.json").read_bytes()


def test_a_checkpoint_in_several_files_is_saved_whole(tmp_path):
    before, after = save_whole(tmp_path / "before", "qwen3_vl"), tmp_path / "after"
    tensors = load_file(before / "model.safetensors")
    (before / "model.safetensors").unlink()
    parts = {f"model-0000{n + 1}-of-00002.safetensors": sorted(tensors)[n::2] for n in range(2)}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, before / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, names in parts.items() for name in names}}
    (before / "model.safetensors.index.json").write_text(json.dumps(index))
    model = extended(before, after)
    assert_same_beside_decoder(before, after)
    model.save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert_same_beside_decoder(before, tmp_path / "parts")
    written = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert written["weight_map"].keys() == tensors.keys()
    assert written["metadata"]["total_parameters"] == sum(each.numel() for each in tensors.values())


def test_a_tied_head_that_the_files_repeat_gets_the_trained_values(tmp_path):
    """Left as it was, transformers would take it for a head of the model's own."""
    before, after = save_whole(tmp_path / "before", "mistral3"), tmp_path / "after"
    tensors = load_file(before / "model.safetensors")
    embedding = "language_model.model.embed_tokens.weight"
    tensors["language_model.lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, before / "model.safetensors", metadata={"format": "pt"})
    extended(before, after)
    saved = tensors_of(after)
    assert torch.equal(saved["language_model.lm_head.weight"], saved[embedding])
    assert torch.equal(saved[embedding], 1.5 * tensors[embedding])


def test_a_head_of_its_own_is_stated(tmp_path):
    before, after = save_whole(tmp_path / "before", "mistral3"), tmp_path / "after"
    tensors = load_file(before / "model.safetensors")
    head = torch.randn_like(tensors["language_model.model.embed_tokens.weight"])
    save_file(
        {**tensors, "language_model.lm_head.weight": head}, before / "model.safetensors", {"format": "pt"}
    )
    extended(before, after)
    assert json.loads((after / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(tensors_of(after)["language_model.lm_head.weight"], 1.5 * head)


def test_weights_that_transformers_would_save_under_another_name_are_refused_before_training(tmp_path):
    """Kimi's layers, if ropewalk took the names that transformers writes."""
    folder = save_whole(tmp_path, "kimi_k25")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_module, "_as_read", lambda model, keys, name: (name, name))
        with pytest.raises(
            RopewalkError, match="cannot be saved again with its encoders: transformers would write"
        ):
            load_model(folder)


def test_a_source_that_is_gone_is_named(tmp_path):
    folder = save_whole(tmp_path / "before", "qwen3_vl")
    model = load_model(folder)
    shutil.rmtree(folder)
    with pytest.raises(RopewalkError, match=str(folder)):
        save_model(model, tmp_path / "after")


def test_a_hub_model_is_saved_with_its_processor(tmp_path, monkeypatch):
    """From the cache, into which the processor's files are downloaded before anything else is done with the model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    before = save_whole(tmp_path / "before", "qwen3_vl")
    cached = tmp_path / "hub" / "models--some--model"
    shutil.copytree(before, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    asked, found = [], huggingface_hub.snapshot_download

    def snapshot_download(name, allow_patterns):
        asked.extend(allow_patterns)
        return found(name, allow_patterns=allow_patterns)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    save_model(load_model("some/model"), tmp_path / "after")
    assert_same_beside_decoder(before, tmp_path / "after")
    assert all(any(fnmatch(name, pattern) for pattern in asked) for name in FILES)
    assert all((tmp_path / "after" / name).read_bytes() == content for name, content in FILES.items())

    def refused(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(
        RopewalkError, match=r"cannot download the processor of some/model, .*: no route to host"
    ):
        load_model("some/model")


def test_what_trainers_save_is_whole(tmp_path):
    """They call ``save_pretrained`` of the model."""
    before, after = save_whole(tmp_path / "before", "internvl"), tmp_path / "after"
    model = load_model(before, ModelSetup(longer(before), CONTEXT))
    model.save_pretrained(after, state_dict={name: each + 1 for name, each in model.state_dict().items()})
    assert_same_beside_decoder(before, after)
    name = "language_model.model.norm.weight"
    assert torch.equal(tensors_of(after)[name], tensors_of(before)[name] + 1)
    assert read_model_config(str(after)).full_attention_rope == longer(before)


@pytest.mark.parametrize(
    "fault", ["another dtype", "rope at the top level", "a new name", "a processor rewritten"]
)
def test_a_fault_would_be_noticed(fault, tmp_path, monkeypatch):
    """Each of the properties above fails if it does not hold."""
    before, after = save_whole(tmp_path / "before", "qwen3_vl"), tmp_path / "after"
    sound = whole_module.WholeCheckpoint
    if fault == "another dtype":
        others = sound._others
        monkeypatch.setattr(sound, "_others", lambda *a: ((n, t.float()) for n, t in others(*a)))
        extended(before, after)
        with pytest.raises(AssertionError):
            assert_same_beside_decoder(before, after)
    elif fault == "a new name":
        others = sound._others
        monkeypatch.setattr(sound, "_others", lambda *a: ((f"x.{n}", t) for n, t in others(*a)))
        extended(before, after)
        with pytest.raises(AssertionError):
            assert_same_beside_decoder(before, after)
    elif fault == "rope at the top level":
        monkeypatch.setattr(whole_module, "decoder_key", lambda source: None)
        with pytest.raises(RopewalkError, match="would not read the model's RoPE"):
            extended(before, after)
    else:
        rewrite = lambda source, target: target.write_text(source.read_text().strip())  # noqa: E731
        monkeypatch.setattr(whole_module.shutil, "copyfile", rewrite)
        extended(before, after)
        assert any((after / name).read_bytes() != content for name, content in FILES.items())
