"""What llama.cpp computes of exported models: its next-token probabilities against those of plain transformers.

    python -m benchmarks.llama_cpp

Tiny random models of three architectures with every RoPE method that a config can state are written as GGUF files in
float32, as llama.cpp's converter writes them and as ``ropewalk export --gguf`` corrects them, and served by llama.cpp
(the wheel ``xllamacpp``) at half, one, two and four times the original length. A case is the KL divergence in nats of
the next token's distribution from that of transformers, or the reason why llama.cpp does not serve it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import parsed, parser_of, write
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.gguf import write_gguf
from ropewalk.models.config.file import config_from_json
from ropewalk.rope import Llama3
from ropewalk.rope.methods.base import unscaled_inv_freq

VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 4, 2, 16, 2
ORIGINAL = 256
CONTEXT = 6 * ORIGINAL
"""Longer than four times the original length, because llama.cpp keeps room for an answer."""
LENGTHS = (ORIGINAL // 2, ORIGINAL, 2 * ORIGINAL, 4 * ORIGINAL)
IN_SHORT_CONTEXT = (ORIGINAL // 2, ORIGINAL - 1)
"""Lengths for a server whose context is the original length, where llama.cpp takes longrope's short factors."""
FAMILIES = ("llama", "qwen2", "qwen3", "phi3")
_LONG = [1.0, 1.1, 1.3, 1.8, 2.5, 3.5, 4.0, 4.0]
_SHORT = [1.0, 1.0, 1.0, 1.05, 1.1, 1.1, 1.1, 1.1]
METHODS: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 40000.0},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, attention_factor 1.5": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "attention_factor": 1.5,
    },
    "yarn, own ramp": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
    },
    "yarn, truncate: false": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": _SHORT,
        "long_factor": _LONG,
        "original_max_position_embeddings": ORIGINAL,
    },
}


def tiny_model(family: str, rope: Mapping[str, Any]) -> Any:
    """A random model whose attention is far from uniform, so that wrong frequencies change its answers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_theta": 10000.0, **rope},
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **({"original_max_position_embeddings": ORIGINAL} if family == "phi3" else {}),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                std = 1.8 / math.sqrt(weight.shape[1]) if "proj" in name else 1.0
                weight.normal_(0, std, generator=generator)
    return model


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """Rows of a projection in the order in which llama.cpp rotates models like Llama: pairs side by side."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def convert(model: Any, path: Path) -> None:
    """Write a GGUF file in float32 with the RoPE keys of llama.cpp's converter.

    Source: llama.cpp, conversion/base.py, conversion/llama.py and conversion/phi.py in autumn 2026.
    """
    import gguf

    config = model.config
    family, rope = config.model_type, config.rope_parameters
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCABULARY)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(rope["rope_theta"])
    tensors: dict[str, list[float]] = {}
    kind = rope["rope_type"]
    if kind == "llama3" and family == "llama":
        # The converter looks for the original length outside rope_parameters, and takes this one where there is none.
        elsewhere = Llama3(HEAD_DIM, rope["rope_theta"], rope["factor"], 1.0, 4.0, 8192)
        unscaled = unscaled_inv_freq(HEAD_DIM, rope["rope_theta"])
        tensors = {"rope_freqs.weight": (unscaled / elsewhere.frequencies().inv_freq).tolist()}
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
        for key in ("attention_factor", "beta_fast", "beta_slow"):
            if rope.get(key) is not None:
                short = key.replace("attention", "attn")
                writer.add_float32(f"{family}.rope.scaling.yarn_{short}", rope[key])
    elif kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        if family == "phi3":
            writer.add_rope_scaling_orig_ctx_len(ORIGINAL)
            scale = CONTEXT / ORIGINAL
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(ORIGINAL)))
            tensors = {"rope_factors_long.weight": _LONG, "rope_factors_short.weight": _SHORT}
    if family == "phi3":
        writer.add_sliding_window(0)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    letters = [f"<0x{number:02X}>" for number in range(VOCABULARY - 3)]
    writer.add_token_list(["<unk>", "<s>", "</s>", *letters])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3] + [6] * (VOCABULARY - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[family.upper()], LAYERS)
    for name, weight in model.state_dict().items():
        if family == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _interleaved(weight, HEADS if "q_proj" in name else KV_HEADS)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), weight.numpy())
    for name, factors in tensors.items():
        writer.add_tensor(name, torch.tensor(factors).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tokens() -> list[int]:
    """A fixed row of random tokens, as long as the longest prompt."""
    return torch.randint(3, VOCABULARY, (LENGTHS[-1],), generator=torch.Generator().manual_seed(1)).tolist()


def served(path: Path, prompts: Sequence[list[int]], context: int) -> list[Tensor]:
    """llama.cpp's log-probabilities ``[VOCABULARY]`` of the token after each prompt, in float64.

    Raises:
        RopewalkError: if llama.cpp does not load the file or answer.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = params.n_batch = params.n_ubatch = context
    params.n_parallel = 1
    params.verbosity = -1
    params.warmup = params.fit_params = False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    # Exact as far as it can be: no half-precision cache, no fused attention.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise RopewalkError(f"llama.cpp does not load it: {error}") from error
    found = []
    for prompt in prompts:
        request = {
            "prompt": prompt,
            "n_predict": 1,
            "n_probs": VOCABULARY,
            "samplers": [],
            "cache_prompt": False,
        }
        answer = server.handle_completions(request)
        if "choices" not in answer:
            raise RopewalkError(f"llama.cpp does not answer: {answer}")
        logprobs = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)
        for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            logprobs[each["id"]] = each["logprob"]
        found.append(logprobs)
    return found


@torch.no_grad()
def divergences(model: Any, path: Path, lengths: Sequence[int], context: int = CONTEXT) -> list[float]:
    """KL divergence in nats of llama.cpp's next token from transformers' after each length."""
    row = tokens()
    prompts = [row[:length] for length in lengths]
    divergence = []
    for prompt, theirs in zip(prompts, served(path, prompts, context), strict=True):
        ours = model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
        divergence.append(float((ours.exp() * (ours - theirs)).sum()))
    return divergence


def case(family: str, name: str, folder: Path) -> dict[str, Any]:
    """One row of the result."""
    model = tiny_model(family, METHODS[name])
    source, out = folder / "converted.gguf", folder / "corrected.gguf"
    convert(model, source)
    row: dict[str, Any] = {"family": family, "method": name, "converted": divergences(model, source, LENGTHS)}
    try:
        written = write_gguf(source, config_from_json(model.config.to_dict()), out)
        row |= {"changes": list(written.changes), "corrected": divergences(model, out, LENGTHS)}
        if name == "longrope":
            row["corrected_in_short_context"] = divergences(model, out, IN_SHORT_CONTEXT, ORIGINAL)
    except RopewalkError as error:
        row["refused"] = str(error)
    source.unlink()
    out.unlink(missing_ok=True)
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=FAMILIES)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    options = parsed(parser, {"families": ["llama"], "methods": ["linear"]}, arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for family in options.families:
            # transformers' Phi-3 takes no method but longrope.
            for name in options.methods:
                if family == "phi3" and name not in ("theta", "longrope"):
                    continue
                row = case(family, name, Path(folder))
                rows.append(row)
                shown = row.get("refused") or " ".join(
                    f"{each:9.1e}" for each in row["corrected"] + row.get("corrected_in_short_context", [])
                )
                before = " ".join(f"{each:9.1e}" for each in row["converted"])
                print(f"{family:6} {name:27} {before}  ->  {shown}", flush=True)
    import xllamacpp

    about = {"xllamacpp": xllamacpp.__version__, "lengths": LENGTHS, "original_length": ORIGINAL}
    write("llama_cpp", json.loads(json.dumps({"about": about, "rows": rows})), options)


if __name__ == "__main__":
    main()
