"""Record what other programs compute from configs, with their own functions: the oracle of ``ropewalk.compatibility``.

Run once for each program and version, in an environment or with a source tree that has it::

    python scripts/observe_readers.py transformers-4          # where transformers 4.57 is installed
    python scripts/observe_readers.py mlx-lm                  # where mlx-lm is installed
    python scripts/observe_readers.py vllm --source vllm-0.33.0
    python scripts/observe_readers.py sglang --source sglang-0.5.23

Servers need no GPU and no installation here: their modules of RoPE are imported from the source tree, and what these
import of the rest of the program is replaced by stand-ins. The results are added to
``tests/compatibility/observed.json``.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import math
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

RECORD = Path(__file__).parent.parent / "tests/compatibility/observed.json"
LENGTH, ORIGINAL = 4096, 1024
SHORT, LONG = [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6], [1.0, 1.2, 1.6, 2.2, 3.0, 3.5, 4.0, 4.0]
COPE = [1.0, 1.0, 1.0, 1.0, 1.0, 1.33333333, 4.0, 1e30]
SCALED = {"original_max_position_embeddings": ORIGINAL, "factor": 4.0}
METHODS: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", **SCALED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", **SCALED},
    "yarn-attention": {"rope_type": "yarn", **SCALED, "attention_factor": 1.0},
    "yarn-mscales": {"rope_type": "yarn", **SCALED, "mscale": 0.7, "mscale_all_dim": 1.0},
    "yarn-zero-mscales": {"rope_type": "yarn", **SCALED, "mscale": 0.0, "mscale_all_dim": 0.0},
    "yarn-one-mscale": {"rope_type": "yarn", **SCALED, "mscale": 0.7},
    "yarn-ramp": {"rope_type": "yarn", **SCALED, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "longrope": {"rope_type": "longrope", **SCALED, "short_factor": SHORT, "long_factor": LONG},
    "longrope-attention": {"rope_type": "longrope", **SCALED, "short_factor": SHORT, "long_factor": LONG,
        "attention_factor": 1.05, "short_mscale": 1.05, "long_mscale": 1.05},
    "longrope-attention-alone": {"rope_type": "longrope", **SCALED, "short_factor": SHORT, "long_factor": LONG,
        "attention_factor": 1.05},
    # Four of eight pairs clipped, as ropewalk.rope.Cope is written.
    "cope": {"rope_type": "longrope", "original_max_position_embeddings": LENGTH, "factor": 1.0, "short_factor": COPE,
        "long_factor": COPE, "attention_factor": 1.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def cases() -> dict[str, dict[str, Any]]:
    """Configs by name: every method in the newer spelling, in the older one, and in both."""
    found = {}
    for family, architecture in FAMILIES.items():
        for name, entry in METHODS.items():
            base = {
                "model_type": family, "architectures": [architecture], "hidden_size": 64, "num_attention_heads": 4,
                "num_key_value_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64, "vocab_size": 64,
                "rms_norm_eps": 1e-5, "head_dim": 16, "max_position_embeddings": LENGTH, "tie_word_embeddings": False,
            }  # fmt: skip
            older: dict[str, Any] = {"rope_theta": 50000.0}
            if entry["rope_type"] != "default":
                older["rope_scaling"] = entry
            newer = {"rope_parameters": {"rope_theta": 50000.0, **entry}}
            if entry["rope_type"] == "longrope":
                base["original_max_position_embeddings"] = entry["original_max_position_embeddings"]
            for spelling, keys in {"newer": newer, "older": older, "both": newer | older}.items():
                found[f"{family} {name} {spelling}"] = base | keys
    return found


def turned(cosine: Any, sine: Any) -> dict[str, Any]:
    """Frequencies and attention factor of scaled cosines and sines at position 1."""
    pairs = [(float(c), float(s)) for c, s in zip(cosine, sine, strict=True)]
    return {
        "inv_freq": [math.atan2(s, c) for c, s in pairs],
        "attention_factor": math.hypot(*pairs[0]),
    }


def by_transformers(config: dict[str, Any], length: int) -> dict[str, Any]:
    """transformers' own functions for the length."""
    from transformers import CONFIG_MAPPING
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    entry = getattr(parsed, "rope_scaling", None) or {}
    kind = entry.get("rope_type", "default")
    inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](parsed, "cpu", length)
    return {"inv_freq": inv_freq.double().tolist(), "attention_factor": float(attention_factor)}


def by_mlx_lm(config: dict[str, Any], length: int) -> dict[str, Any]:
    """The rotation that the attention of mlx-lm's model applies at position 1."""
    import importlib

    import mlx.core as mx

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    rope = module.Attention(module.ModelArgs.from_dict(json.loads(json.dumps(config)))).rope
    pairs = config["head_dim"] // 2
    units = mx.concatenate([mx.eye(pairs), mx.zeros((pairs, pairs))], axis=1)
    out = rope(units.reshape(1, pairs, 1, 2 * pairs), offset=1).reshape(pairs, 2 * pairs)
    return turned([out[i, i].item() for i in range(pairs)], [out[i, i + pairs].item() for i in range(pairs)])


class StandIns(Loader):
    """A finder of modules that replaces every module of a program but those of a folder."""

    def __init__(self, program: str, real: str) -> None:
        self.program, self.real = program, real

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != self.program or name.startswith(self.real):
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        import torch

        class Operation(torch.nn.Module):
            """Stand-in for the class that chooses a kernel."""

            def __init__(self, *_: Any, **__: Any) -> None:
                super().__init__()

            @classmethod
            def register(cls, *_: Any, **__: Any) -> Any:
                return lambda registered: registered

            def enabled(self) -> bool:
                return False

            def dispatch_forward(self, *_: Any, **__: Any) -> None:
                return None

        module = types.ModuleType(spec.name)
        module.__path__ = [str(Path(*spec.name.split(".")))]
        module.__getattr__ = lambda name: (  # type: ignore[method-assign]
            Operation if name in ("CustomOp", "BaseFusedOp") else _attribute(name)
        )
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name.startswith("is_") or name.startswith("get_bool") or name.startswith("_is"):
        return lambda *_: False
    stand_in = MagicMock(name=name)
    if name == "get_current_vllm_config":
        stand_in.return_value = SimpleNamespace(model_config=SimpleNamespace(max_model_len=LENGTH))
    return stand_in


def server(program: str, source: Path) -> Any:
    """``get_rope`` of a server, imported from its source tree."""
    import importlib

    place = {
        "vllm": "vllm.model_executor.layers.rotary_embedding",
        "sglang": "sglang.srt.layers.rotary_embedding",
    }[program]
    sys.path.insert(0, str(source))
    stand_ins: Any = StandIns(program, place)
    sys.meta_path.insert(0, stand_ins)
    parent = importlib.import_module(place.rpartition(".")[0])
    parent.__path__ = [str(source / Path(*place.split(".")[:-1]))]
    return importlib.import_module(place if program == "vllm" else f"{place}.factory").get_rope


def by_server(program: str, get_rope: Any, config: dict[str, Any], length: int) -> dict[str, Any]:
    """The table of cosines and sines that a server's module of RoPE computes, at position 1.

    Servers read configs with transformers 5, which is used here as well.
    """
    import torch
    from transformers import CONFIG_MAPPING

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    parameters, dim = dict(parsed.rope_parameters), config["head_dim"]
    if program == "vllm":
        rope = get_rope(dim, LENGTH, rope_parameters=parameters, dtype=torch.float32)
    else:
        # The stand-in of its settings makes it ask for a GPU.
        with patch.object(torch.Tensor, "cuda", lambda tensor: tensor):
            rope = get_rope(
                dim, dim, LENGTH, parameters["rope_theta"], rope_scaling=parameters, dtype=torch.float32
            )
    at = 1
    table = getattr(rope, "long_short_cos_sin_cache", None)
    if table is None:
        table = rope.cos_sin_cache
    elif program == "vllm" or length > ORIGINAL:
        # vLLM was started for the whole length, which decides for every input.
        at += parameters["original_max_position_embeddings"]
    return turned(*table[at].double().chunk(2))


def function_of(path: Path, name: str, names: dict[str, Any]) -> Any:
    """One function of a module that cannot be imported whole."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = (each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == name)
    found.returns, found.decorator_list = None, []
    for argument in found.args.args:
        argument.annotation = None
    exec(compile(ast.Module([found], []), str(path), "exec"), names)
    return names[name]


def served(program: str, source: Path, config: dict[str, Any]) -> int:
    """The tokens that a server serves without an option."""
    from transformers import CONFIG_MAPPING

    parsed = CONFIG_MAPPING[config["model_type"]].from_dict(json.loads(json.dumps(config)))
    if program == "sglang":
        path = source / "sglang/srt/utils/hf_transformers/common.py"
        keys = (
            "max_sequence_length",
            "seq_length",
            "max_seq_len",
            "model_max_length",
            "max_position_embeddings",
        )
        return int(function_of(path, "get_context_length", {"CONTEXT_LENGTH_KEYS": keys})(parsed))
    platform = SimpleNamespace(check_max_model_len=lambda length: length)
    names = {
        "ALLOWED_LAYER_TYPES": (),
        "current_platform": platform,
        "logger": MagicMock(),
        "is_rope_parameters_nested": lambda entry: False,
        "iter_rope_parameters": lambda each: [each.rope_parameters],
    }
    find = function_of(source / "vllm/config/model.py", "_get_and_verify_max_len", names)
    architecture = SimpleNamespace(
        derived_max_model_len_and_key=(parsed.max_position_embeddings, "max_position_embeddings")
    )
    return int(find(parsed, architecture, None, None, False, None))


def written(record: dict[str, Any]) -> str:
    """JSON with one line for each config and each observation, and numbers of nine digits, as float32 has."""

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: short(each) for key, each in value.items()}
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.9g}") if isinstance(value, float) else value

    def lines(values: dict[str, Any]) -> str:
        return ",\n".join(f"{json.dumps(key)}: {json.dumps(short(value))}" for key, value in values.items())

    observed = ",\n".join(
        f"{json.dumps(key)}: {{\n{lines(values)}\n}}" for key, values in record["observed"].items()
    )
    return f'{{"configs": {{\n{lines(record["configs"])}\n}},\n"observed": {{\n{observed}\n}}}}\n'


def main(arguments: Sequence[str] | None = None) -> None:
    """Observe one program and add the results to the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=("transformers-4", "mlx-lm", "vllm", "sglang"))
    parser.add_argument("--source", type=Path, help="source tree of the server")
    parser.add_argument("--key", help="name of the reader; default: the program")
    given = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    get_rope = None if given.source is None else server(given.program, given.source.resolve())
    found: dict[str, Any] = {}
    for name, config in cases().items():
        each: dict[str, Any] = {}
        try:
            for length in (ORIGINAL, LENGTH):
                if get_rope is not None:
                    each[str(length)] = by_server(given.program, get_rope, config, length)
                elif given.program == "mlx-lm":
                    each[str(length)] = by_mlx_lm(config, length)
                else:
                    each[str(length)] = by_transformers(config, length)
            if get_rope is not None:
                each["served"] = served(given.program, given.source.resolve(), config)
        except (AttributeError, AssertionError, KeyError, TypeError, ValueError) as error:
            each = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        found[name] = each
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    record["configs"] = cases()
    record.setdefault("observed", {})[given.key or given.program] = found
    RECORD.write_text(written(record))
    errors = sum("error" in each for each in found.values())
    print(f"{given.key or given.program}: {len(found)} configs, {errors} refused")


if __name__ == "__main__":
    main()
