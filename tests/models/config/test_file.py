"""Bare config files: what each says, what its class adds, what a load holds, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.data.read.embedded import EMBEDDED, demo_model_path
from ropewalk.errors import RopewalkError
from ropewalk.models.config.file import _check_rotary_dim, config_from_json, read_model_config
from ropewalk.models.rope.frequencies import loaded_rope
from ropewalk.rope import Default, Linear, LongRope, Proportional, RopeMethod, Yarn, methods_from_config
from tests.checkpoint_cases import CASES, CheckpointCase, path_of
from tests.versions import pretend_transformers

# transformers computes in float32; what it rounds adds up to less, as in tests/rope/rope_cases.py.
FLOAT32 = 1e-6
SMALL = {"hidden_size": 64, "num_attention_heads": 4}
LLAMA = {"model_type": "llama", **SMALL, "max_position_embeddings": 256}

cases = pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)


def written(folder: Path, config: Any) -> str:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return str(path)


def trained_length(method: RopeMethod, longest: int) -> int:
    if isinstance(method, Linear):
        return int(longest / method.factor)
    return getattr(method, "original_max_position_embeddings", longest)


def test_every_file_has_a_case() -> None:
    assert {path.stem for path in path_of("any").parent.glob("*.json")} == set(CASES)


@cases
def test_published_config_is_read_as_it_is_meant(name: str, case: CheckpointCase) -> None:
    config = read_model_config(str(path_of(name)))
    methods = methods_from_config(config.values)
    assert methods == case.methods
    assert config.defaults == case.defaults
    assert config.config_class == case.config_class
    assert config.model == str(path_of(name))
    chunks = config.values.get("dual_chunk_attention_config") or {}
    longest = chunks.get("original_max_position_embeddings", config.values["max_position_embeddings"])
    assert trained_length(next(iter(methods.values())), longest) == case.trained_length


@cases
def test_what_the_file_says_stays(name: str, case: CheckpointCase) -> None:
    said = json.loads(path_of(name).read_text())
    said = said.get("text_config", said)
    values = read_model_config(str(path_of(name))).values
    assert {key: values[key] for key in said} == said
    assert not set(said) & set(case.defaults)
    assert {key: values[key] for key in case.defaults} == case.defaults


@cases
def test_transformers_computes_what_was_read(name: str, case: CheckpointCase) -> None:
    held = loaded_rope(read_model_config(str(path_of(name))))
    if case.config_class is None:
        assert held is None
        return
    assert held is not None
    assert {one.layer_type for one in held} == set(case.methods)
    for one in held:
        inv_freq, attention_factor = case.methods[one.layer_type].frequencies()
        assert one.inv_freq.dtype == torch.float64
        torch.testing.assert_close(one.inv_freq, inv_freq, rtol=FLOAT32, atol=0)
        assert one.attention_factor == pytest.approx(attention_factor, rel=1e-12)
        assert one.dtype == "float32"


@cases
def test_config_warnings_are_those_of_the_table(name: str, case: CheckpointCase) -> None:
    said = read_model_config(str(path_of(name))).config_warnings
    expected = [part for part in (case.warning, case.documented) if part]
    assert len(said) == len(expected)
    assert all(any(part in sentence for sentence in said) for part in expected)


@pytest.mark.parametrize(
    ("said", "rotary_dim", "defaults"),
    [
        ({"model_type": "glm4", "rope_theta": 1e4, "head_dim": 16}, 8, {"partial_rotary_factor": 0.5}),
        ({"model_type": "phi", "rope_theta": 1e4}, 8, {"partial_rotary_factor": 0.5}),
        ({"model_type": "stablelm", "rope_theta": 1e4}, 4, {"partial_rotary_factor": 0.25}),
        ({"model_type": "stablelm", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, 8, {}),
        ({"model_type": "gpt_neox"}, 4, {"rope_theta": 10000.0, "partial_rotary_factor": 0.25}),
        ({"model_type": "gpt_neox", "rotary_pct": 1.0, "rotary_emb_base": 1e4}, 16, {}),
        ({"model_type": "qwen3", "rope_theta": 1e6}, 128, {"head_dim": 128}),
        ({"model_type": "cohere2", "rope_theta": 5e4, "rotary_pct": 1.0}, 16, {"sliding_window": 4096}),
        ({"model_type": "first-qwen", "rotary_pct": 0.5, "rotary_emb_base": 1e4}, 8, {}),
    ],
)
def test_partial_rotation_and_head_width_come_from_the_class(
    said: dict[str, Any], rotary_dim: int, defaults: dict[str, Any], tmp_path: Path
) -> None:
    config = read_model_config(written(tmp_path, {**SMALL, "max_position_embeddings": 256, **said}))
    assert config.defaults == defaults
    (method,) = methods_from_config(config.values).values()
    assert method.rotary_dim == rotary_dim
    held = loaded_rope(config)
    if held is not None:
        torch.testing.assert_close(
            held[0].inv_freq, method.frequencies().inv_freq, rtol=FLOAT32, atol=0, check_dtype=False
        )


def test_a_class_may_supply_a_whole_method(tmp_path: Path) -> None:
    config = read_model_config(written(tmp_path, {"model_type": "gpt_oss", "rope_theta": 150000}))
    (method,) = methods_from_config(config.values).values()
    assert method == Yarn(64, 150000, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
    assert config.defaults["rope_scaling"]["rope_type"] == "yarn"
    assert "rope_theta" not in config.defaults


def test_phi_3_supplies_the_original_length(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    said = {"model_type": "phi3", **SMALL, "max_position_embeddings": 131072, "rope_scaling": scaling}
    config = read_model_config(written(tmp_path, said))
    assert config.defaults == {"rope_theta": 10000.0, "original_max_position_embeddings": 4096}
    (method,) = methods_from_config(config.values).values()
    assert isinstance(method, LongRope)
    assert method.original_max_position_embeddings == 4096


def test_layer_types_in_the_present_spelling_are_completed_one_by_one(tmp_path: Path) -> None:
    parameters = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
    said = {"model_type": "gemma3_text", **SMALL, "head_dim": 16, "rope_parameters": parameters}
    config = read_model_config(written(tmp_path, said))
    assert methods_from_config(config.values) == {
        "full_attention": Linear(16, 1000000.0, 8.0),
        "sliding_attention": Default(16, 10000.0),
    }
    assert config.defaults["full_attention.rope_theta"] == 1000000.0
    assert config.defaults["sliding_attention.rope_theta"] == 10000.0


def test_olmo_3_scales_full_layers_alone(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    said = {"model_type": "olmo3", **SMALL, "max_position_embeddings": 65536, "rope_theta": 5e5}
    config = read_model_config(written(tmp_path, {**said, "rope_scaling": scaling}))
    assert methods_from_config(config.values) == {
        "full_attention": Yarn(16, 5e5, 8.0, 8192),
        "sliding_attention": Default(16, 5e5),
    }
    assert set(config.defaults) == {"sliding_window"}


MIMO = {
    "model_type": "mimo_v2_flash", "hidden_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 192, "max_position_embeddings": 262144, "sliding_window": 128,
}  # fmt: skip


def test_mimo_v2_flash_names_the_base_of_its_windowed_layers_in_its_own_way(tmp_path: Path) -> None:
    """Values of XiaomiMiMo/MiMo-V2-Flash on the Hugging Face Hub."""
    stated = {**MIMO, "rope_theta": 5_000_000, "swa_rope_theta": 10_000, "partial_rotary_factor": 0.334}
    expected = {"full_attention": Default(64, 5e6), "sliding_attention": Default(64, 1e4)}
    assert read_model_config(written(tmp_path, stated)).methods == expected
    # Without them, the class supplies the same.
    assert read_model_config(written(tmp_path, MIMO)).methods == expected
    with pytest.raises(RopewalkError, match="rope_theta"):
        read_model_config(written(tmp_path, {**stated, "swa_rope_theta": 20_000}))


def test_layer_types_that_differ_in_their_partial_rotation_come_from_the_class(tmp_path: Path) -> None:
    laguna = {
        "model_type": "laguna",
        "head_dim": 128,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
    }
    assert read_model_config(written(tmp_path, laguna)).methods == {
        "full_attention": Default(64, 5e5),
        "sliding_attention": Default(128, 1e4),
    }


def test_a_length_beside_the_layer_types_must_repeat_that_of_one(tmp_path: Path) -> None:
    """RoPE of poolside/Laguna-XS.2 on the Hugging Face Hub."""
    full = {
        "rope_theta": 5e5, "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "beta_slow": 1.0, "beta_fast": 64.0, "attention_factor": 1.0, "partial_rotary_factor": 0.5,
    }  # fmt: skip
    entries = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}
    laguna = {"model_type": "laguna", "num_hidden_layers": 4, "rope_parameters": entries}
    methods = read_model_config(written(tmp_path, laguna)).methods
    assert methods["full_attention"].original_max_position_embeddings == 4096
    assert methods["sliding_attention"] == Default(128, 1e4)
    beside = {**entries, "original_max_position_embeddings": 4096}
    assert read_model_config(written(tmp_path, {**laguna, "rope_parameters": beside})).methods == methods
    for wrong in ({"original_max_position_embeddings": 8192}, {"factor": 32.0}):
        key, value = next(iter(wrong.items()))
        with pytest.raises(
            RopewalkError, match=f"rope_parameters sets {key} {value} outside the entries of its layer types"
        ):
            read_model_config(written(tmp_path, {**laguna, "rope_parameters": {**entries, **wrong}}))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"model_type": "ernie4_5", "head_dim": 7}, "head_dim.*7"),
        ({"model_type": "minimax_m2", "rotary_dim": 99}, "got 99 from rotary_dim 99"),
        (
            {**LLAMA, "rope_theta": 1e4, "partial_rotary_factor": 0.2},
            r"got 3 from head_dim 16 .* times partial_rotary_factor 0\.2",
        ),
    ],
)
def test_an_odd_number_of_rotated_dimensions_names_the_key_it_follows_from(
    keys: dict, named: str, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=named):
        read_model_config(written(tmp_path, keys))


def test_a_window_that_is_null_stays_none(tmp_path: Path) -> None:
    said = {**LLAMA, "model_type": "mistral", "rope_theta": 1e4}
    assert read_model_config(written(tmp_path, said)).defaults == {"sliding_window": 4096}
    config = read_model_config(written(tmp_path, {**said, "sliding_window": None}))
    assert config.defaults == {}
    assert config.values["sliding_window"] is None


def test_windows_of_qwen_are_off_by_default(tmp_path: Path) -> None:
    said = {**LLAMA, "model_type": "qwen2", "rope_theta": 1e4, "sliding_window": 64}
    config = read_model_config(written(tmp_path, said))
    assert config.defaults == {"use_sliding_window": False}
    assert config.config_warnings == []


def test_dtype_of_a_multimodal_model_is_that_of_its_decoder(tmp_path: Path) -> None:
    said = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {"model_type": "gemma3_text"}}
    assert read_model_config(written(tmp_path, said)).values["dtype"] == "bfloat16"


@pytest.mark.parametrize("named", [True, False])
def test_embedded_checkpoint_is_read_by_its_name(named: bool) -> None:
    folder = str(demo_model_path())
    config = read_model_config(EMBEDDED, folder) if named else read_model_config(folder)
    assert config.model == (EMBEDDED if named else folder)
    assert methods_from_config(config.values)
    assert loaded_rope(config)


def test_file_may_have_any_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**LLAMA, "rope_theta": 1e4}))
    assert read_model_config(str(path)).config_class == "LlamaConfig"


def test_hub_id_is_read_through_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, {**LLAMA, "rope_theta": 1e4})
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda model, name: path)
    monkeypatch.chdir(tmp_path)
    assert read_model_config("meta-llama/Llama-3-8B").model == "meta-llama/Llama-3-8B"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "as JSON"),
        ("[1]", "must contain a JSON object, got list"),
        ('{"rope_theta": 1e4, "rope_theta": 5e5}', "rope_theta twice, 10000.0 and 500000.0"),
        ('{"a": ' * 100000, "as JSON"),
        ("\udcff", "as JSON"),
    ],
)
def test_bad_files_are_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(RopewalkError, match=said) as caught:
        read_model_config(str(path))
    assert len(str(caught.value).splitlines()) == 1


def test_missing_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RopewalkError, match=r"has no config\.json"):
        read_model_config(str(tmp_path))
    for model in ("./missing", "/missing/folder", "missing/config.json", "a/b/c"):
        with pytest.raises(RopewalkError, match=f"no folder or file {model}"):
            read_model_config(model)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        RopewalkError, match="no folder nobody/nothing, and no config\\.json could be loaded"
    ) as caught:
        read_model_config("nobody/nothing")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "gpt2"}, "model type 'gpt2' \\(GPT2Config\\) has no RoPE parameters"),
        ({"model_type": "bloom"}, "BloomConfig"),
        ({"model_type": "blt"}, r"\(blt\) has four RoPEs, and reads bytes in patches"),
        ({"model_type": "gemma4_assistant"}, r"\(gemma4_assistant\) drafts tokens .*; extend that model$"),
        ({"model_type": "gemma4_unified_assistant"}, "extend that model$"),
        ({"model_type": "falcon", "alibi": True}, "ALiBi positions and no RoPE \\(FalconConfig\\)"),
        ({"model_type": "granitemoehybrid"}, "position_embedding_type is None"),
        ({"model_type": "own", **SMALL}, "no rope_theta"),
        ({**SMALL}, "no rope_theta"),
        ({"model_type": "own", **SMALL, "rope_theta": 1e4, "use_dynamic_ntk": True}, "use_dynamic_ntk True"),
        (
            {"model_type": "own", **SMALL, "rope_theta": 1e4, "rope_ratio": 50},
            "rope_ratio 50 .* is unknown",
        ),
        (
            {"model_type": "own", **SMALL, "rope_theta": 1e4, "rotary_dim": 8},
            "rotary_dim is 8, but .* gives 16",
        ),
        (
            {"model_type": "own", **SMALL, "rope_theta": 1e4, "rotary_emb_base": 5e4},
            "rotary_emb_base is 50000",
        ),
        (
            {**LLAMA, "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            "rope_theta has different values",
        ),
        (
            {**LLAMA, "rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
            "but the key 'type' is",
        ),
        ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "transformers' LlamaConfig rejects"),
        ({**LLAMA, "rope_theta": 1e4, "rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq"),
        ({**LLAMA, "rope_theta": 1e4, "hidden_size": 66}, "hidden_size 66 is not a multiple of .* 4"),
        (
            {**LLAMA, "rope_theta": 1e4, "num_attention_heads": 0},
            "num_attention_heads is 0 in the config, but must be",
        ),
        ({**LLAMA, "rope_theta": 1e4, "hidden_size": "64"}, "hidden_size must be .* got '64'"),
        ({**LLAMA, "rope_theta": [1e4]}, "rope_theta must be a finite number"),
        *(
            (
                {**LLAMA, "rope_theta": 1e4, "original_max_position_embeddings": 64, "rope_scaling": scaling},
                "original_max_position_embeddings 64 stands at the top level .* model type 'llama': it would take 256 "
                "instead; move original_max_position_embeddings into rope_scaling$",
            )
            for scaling in (
                {"type": "yarn", "factor": 4.0},
                {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
                {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            )
        ),
        # What the class does not read, or reads as something else, is not left unsaid.
        ({**LLAMA, "rope_theta": 1e4, "rotary_pct": 0.5}, "rotary_dim 8, but .* LlamaConfig reads 16"),
        (
            {**LLAMA, "model_type": "gpt_neox", "rope_theta": 5e5},
            "rope_theta 500000.0, but .* GPTNeoXConfig reads 10000.0",
        ),
        (
            {
                "model_type": "phi3",
                **SMALL,
                "max_position_embeddings": 65536,
                "rope_theta": 1e4,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32768},
            },
            "Phi3Config",
        ),
        (
            {"model_type": "gemma3", "rope_theta": 1e4, "text_config": {"rope_theta": 1e6}},
            "rope_theta is 10000.0 at the top level of the config but 1000000.0 in text_config",
        ),
        ({"model_type": "llava", "text_config": {"model_type": "none of theirs"}}, "LlavaConfig rejects"),
        (
            {
                "model_type": "rag",
                "question_encoder": {"model_type": "dpr"},
                "generator": {"model_type": "bart"},
            },
            "ropewalk cannot find the decoder's config, .* in RagConfig",
        ),
        (
            {
                "model_type": "musicgen",
                "text_encoder": {"model_type": "t5"},
                "audio_encoder": {"model_type": "encodec"},
                "decoder": {"model_type": "musicgen_decoder"},
            },
            "has no single decoder",
        ),
    ],
)
def test_configs_that_no_rope_can_be_read_from_are_refused(
    config: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=said) as caught:
        read_model_config(written(tmp_path, config))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("family", ["hunyuan_v1_dense", "hunyuan_v1_moe"])
def test_alpha_of_hunyuan_is_the_base_that_transformers_computes(family: str, tmp_path: Path) -> None:
    """The published shape; the oracle is the rotary module of transformers' own class."""
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    stated = {**SMALL, "model_type": family, "head_dim": 16, "rope_theta": 1e4, "rope_scaling": scaling}
    config = read_model_config(written(tmp_path, {**stated, "max_position_embeddings": 4096}))
    (method,) = config.methods.values()
    assert method == Default(16, 1e4 * 1000 ** (16 / 14))
    (held,) = loaded_rope(config) or ()
    # transformers computes the powers in float32.
    torch.testing.assert_close(held.inv_freq, method.frequencies().inv_freq, rtol=1e-6, atol=0)
    assert held.attention_factor == 1


def test_rope_that_no_model_holds_is_refused(tmp_path: Path) -> None:
    config = read_model_config(written(tmp_path, {"model_type": "granite_swa", "rope_theta": 1e4}))
    with pytest.raises(
        RopewalkError, match=r"cannot build transformers' rotary module for .* has 2 rotary modules, but"
    ):
        loaded_rope(config)


def test_code_of_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "own.Config", "AutoModel": "own.Model", "AutoModelForCausalLM": "own.Model"}
    for model_type in ("llama", "own"):
        said = {**LLAMA, "model_type": model_type, "rope_theta": 1e4, "auto_map": auto_map}
        written(tmp_path, said)
        config = read_model_config(str(tmp_path))
        assert methods_from_config(config.values) == {None: Default(16, 1e4)}
        loaded_rope(config)


def test_rope_outside_the_decoders_config_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}
    for key, value in (("rope_theta", 1e6), ("max_position_embeddings", 131072)):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": "llava", key: value, "text_config": text}))
        with pytest.raises(
            RopewalkError, match=f"{key} only in text_config, but the config has {key} .* at the top level"
        ):
            read_model_config(str(path))
        path.write_text(json.dumps({"model_type": "llava", key: value, "text_config": {**text, key: 7e5}}))
        with pytest.raises(
            RopewalkError, match=f"{key} is .* at the top level of the config but 700000.0 in text_config"
        ):
            read_model_config(str(path))


def test_a_config_without_the_decoders_part_does_not_get_its_defaults() -> None:
    with pytest.raises(RopewalkError, match="reads max_position_embeddings only in text_config"):
        config_from_json({"model_type": "gemma3", "max_position_embeddings": 777})


def test_gemma_4_says_which_values_come_from_its_class() -> None:
    config = config_from_json({"model_type": "gemma4", "text_config": {"model_type": "gemma4_text"}})
    assert config.methods["full_attention"] == Proportional(512, 1e6, partial_rotary_factor=0.25)
    assert config.methods["sliding_attention"] == Default(256, 1e4)
    said = {"full_attention.head_dim": 512, "full_attention.partial_rotary_factor": 0.25}
    assert said.items() <= config.defaults.items()
    stated = config_from_json({"model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 32})
    assert (stated.layers[0].key_dim, stated.head_dim) == (8, 32)
    assert "full_attention.head_dim" not in stated.defaults


def test_of_multi_head_latent_attention_rope_rotates_its_own_part_of_a_head(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    values = {"qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "rope_theta": 50000.0}
    path.write_text(json.dumps({"model_type": "kimi_k9", "num_hidden_layers": 2, **values}))
    config = read_model_config(str(path))
    assert (config.head_dim, config.key_dim, config.widest_dims) == (64, 192, (192, 128))
    assert config.methods[None].rotary_dim == 64


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta has different values",
        ),
        (
            {
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
                "rope_scaling": {"type": "linear", "factor": 2.0},
            },
            "contradicts itself",
        ),
        ({"rope_theta": 1e4, "rope_ratio": 5}, "rope_ratio 5 in the config is unknown"),
        ({"rope_theta": 1e4, "rotary_pct": 0.25}, "but transformers' LlamaConfig reads"),
    ],
)
def test_a_load_refuses_what_inspect_refuses(keys: dict, message: str, tmp_path: Path) -> None:
    """transformers takes one of two values that contradict each other, and says nothing."""
    from ropewalk.models.config.read import read_config

    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, **keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for read in (read_model_config, read_config):
        with pytest.raises(RopewalkError, match=message):
            read(str(tmp_path))


def test_a_load_says_every_default_aloud_and_only_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from ropewalk.models.config.read import read_config

    config = {
        "model_type": "gpt_neox",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "rotary_emb_base": 500000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    read_config(tmp_path)
    read_config(tmp_path)
    said = [record.getMessage() for record in caplog.records]
    assert not any("rope_theta" in line for line in said)
    assert sum("partial_rotary_factor" in line and "default of 0.25" in line for line in said) == 1


def test_a_rotary_dim_that_transformers_does_not_read_yet_is_refused_with_the_version_that_does(monkeypatch):
    """MiniMax-M2: 5.17 rotates whole heads of 128."""
    values, methods = {"model_type": "minimax_m2", "rotary_dim": 64}, {None: Default(128, 5e6)}
    pretend_transformers(monkeypatch, "5.17.0")
    said = r"rotary_dim is 64, .* gives 128, as transformers 5\.17\.0 would compute; use transformers 5\.18 or later$"
    with pytest.raises(RopewalkError, match=said):
        _check_rotary_dim(values, methods)
    pretend_transformers(monkeypatch, "5.18.0")
    with pytest.raises(RopewalkError, match=r"gives 128; correct rotary_dim, or the other keys$"):
        _check_rotary_dim(values, methods)
