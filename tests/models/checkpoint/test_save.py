"""Saved models are the same in plain transformers."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from ropewalk import PackedLayout, load_model
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.read import read_config
from ropewalk.models.load import (
    ModelSetup,
    attach,
)
from ropewalk.rope import (
    Theta,
    Yarn,
    method_for_target,
)
from tests.models.families import tiny_model
from tests.programs import run_interpreter


def token_ids(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 97, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def checkpoint(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.slow
def test_a_saved_model_is_the_same_in_plain_transformers(checkpoint, tmp_path):
    """Loaded by a process in which importing ropewalk fails, the logits are those of the model in memory."""
    ropes = (
        None,
        Theta(rotary_dim=8, rope_theta=5e5),
        Yarn(rotary_dim=8, rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
    )
    ids, layout, expected = token_ids(64), PackedLayout.from_lengths([64], "full", 0), {}
    for number, rope in enumerate(ropes):
        model = load_model(checkpoint, ModelSetup(rope=rope, exact_rope=False))
        saved = tmp_path / f"saved {number}"
        save_model(model, saved)
        assert "ropewalk" not in (saved / "config.json").read_text()
        expected[str(saved)] = model(ids, layout=layout).logits.detach()
    torch.save({"ids": ids, "logits": expected}, tmp_path / "expected.pt")
    # One process for all: it spends its time on importing transformers.
    program = (
        "import sys, torch; sys.modules['ropewalk'] = None\n"
        "from transformers import AutoModelForCausalLM\n"
        "expected = torch.load(sys.argv[1], weights_only=True)\n"
        "for folder, logits in expected['logits'].items():\n"
        "    model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "    print(float((model(expected['ids']).logits - logits).abs().max()))\n"
    )
    result = run_interpreter(program, tmp_path / "expected.pt")
    result.check_returncode()
    off = [float(line) for line in result.stdout.splitlines()]
    assert len(off) == len(ropes)
    # Two float32 kernels over logits below 1; the same cos and sin.
    assert max(off) < 1e-6


@pytest.mark.parametrize("family", ["llama", "glm4", "gpt_neox", "cohere2", "granite"])
@pytest.mark.parametrize("method", ["theta", "linear", "ntk", "yarn", "llama3"])
def test_an_extended_model_is_the_same_in_plain_transformers_at_the_new_positions(family, method, tmp_path):
    tiny_model(family).save_pretrained(tmp_path / "old")
    (current,) = read_config(tmp_path / "old").methods.values()
    rope = method_for_target(method, current, 256, 1024)
    model = load_model(tmp_path / "old", ModelSetup(rope=rope, max_position_embeddings=1024))
    save_model(model, tmp_path / "new")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert plain.config.max_position_embeddings == 1024
    positions = torch.arange(904, 1024)[None]
    layout = PackedLayout.from_lengths([120], "full", 0)
    ours = model(token_ids(120), layout=layout, position_ids=positions).logits
    theirs = plain(token_ids(120), position_ids=positions).logits
    # Angles of up to 1024 rad rounded to float32 (6e-5 rad) reach logits of about 0.5 far attenuated.
    assert (ours - theirs).abs().max() < 1e-5


@pytest.fixture
def untied(tmp_path):
    """A checkpoint whose config says that head and embedding are one, and whose file has a head of its own."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "untied")
    path = tmp_path / "untied" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))
    return tmp_path / "untied", model


def test_a_head_of_its_own_is_kept_and_written_as_such(untied, tmp_path, caplog):
    folder, stock = untied
    model = load_model(folder)
    assert "its output head differs from its embedding" in caplog.text
    assert torch.equal(model.lm_head.weight, stock.lm_head.weight)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    save_model(model, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["tie_word_embeddings"] is False
    weights = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(weights["lm_head.weight"], stock.lm_head.weight)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("separate", [True, False])
def test_a_trainer_writes_whether_the_head_is_the_embedding(family, separate, tmp_path):
    """Gemma's class ties them by default, and a config does not say so."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_model(family).config)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    attach(model)
    if separate:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    model.save_pretrained(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.tie_word_embeddings is not separate
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) == separate
    ids = token_ids(24)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    # Angles that are rounded to float32 and not, under logits of 33 in size: the head's weights are near 1.
    torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=0, atol=1e-4)
