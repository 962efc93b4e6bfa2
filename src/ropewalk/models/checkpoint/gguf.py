"""Write a model's RoPE into a GGUF file that llama.cpp's converter made of it.

The converter writes the type of longrope without its factors for models like Llama, takes 8,192 tokens for the original
length of llama3 whatever the config says, and writes yarn's attention factor under a key that the program overwrites.
llama.cpp reports none of this: the model runs with other frequencies than it was trained with. Measured against
llama.cpp itself by ``python -m benchmarks.llama_cpp``.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import replacing
from ropewalk.io.results import Result
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import Default, Linear, Llama3, LongRope, RopeMethod, Yarn
from ropewalk.rope.methods.base import unscaled_inv_freq
from ropewalk.rope.methods.longrope import RIGHT_AT_EVERY_LENGTH

ONE, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors of factors, by which llama.cpp divides frequencies: at every length, or beyond and up to the original one."""
READS = {"llama": (ONE, LONG, SHORT), "phi3": (LONG, SHORT), "qwen2": (), "qwen3": ()}
"""The tensors that llama.cpp loads for an architecture; it refuses a file with any other. Only these were tried."""
PREFIX = "rope.scaling."
KEYS = ("type", "factor", "original_context_length", "attn_factor", "yarn_ext_factor", "yarn_attn_factor",
    "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier", "finetuned", "alpha")  # fmt: skip
"""Every key below ``rope.scaling.``: those that a method does not need are removed."""


@dataclass(frozen=True)
class GgufRope:
    """How a GGUF file states a RoPE method, so that llama.cpp computes the same frequencies.

    Attributes:
        metadata: values by key, without the architecture in front.
        tensors: tensors of factors by name, one factor for each rotary pair.
        notes: what the user needs to know, in one sentence each.
        short: inputs of up to so many tokens need a context of that length; None if any context serves them.
    """

    metadata: Mapping[str, str | int | float]
    tensors: Mapping[str, Sequence[float]]
    notes: tuple[str, ...] = ()
    short: int | None = None


@dataclass(frozen=True)
class GgufResult(Result):
    """A GGUF file that was written.

    Attributes:
        source: file of llama.cpp's converter.
        out: the new file.
        architecture: llama.cpp's name of the architecture.
        method: RoPE method of the model's config.
        changes: what differs from the source, in one phrase each; empty if it was right.
        notes: what the user needs to know, in one sentence each.
        launch: command of llama.cpp by the inputs that it serves right, in words.
    """

    source: Path
    out: Path
    architecture: str
    method: str
    changes: tuple[str, ...]
    notes: tuple[str, ...]
    launch: Mapping[str, str]


def gguf_rope(method: RopeMethod, architecture: str) -> GgufRope:
    """State a RoPE method for llama.cpp.

    Args:
        method: RoPE method of all layers.
        architecture: llama.cpp's name of the architecture, as in ``general.architecture``.

    Raises:
        RopewalkError: if llama.cpp cannot compute the method for this architecture, or it was not tried.

    Source: llama.cpp, src/llama-context.cpp (attention factor of yarn), llama_model::get_rope_factors, and the
    CPU kernel of RoPE, in autumn 2026.
    """
    method = method.as_written()
    base: dict[str, str | int | float] = {"rope.freq_base": float(method.rope_theta)}
    if isinstance(method, Default):
        return GgufRope(base, {})
    if architecture not in READS:
        raise RopewalkError(
            f"ropewalk has tested {method.name} in llama.cpp only for the architectures {', '.join(READS)}, not for "
            f"{architecture}; extend with a new rope_theta, which works for every architecture"
        )
    attention = method.frequencies().attention_factor
    match method:
        case Linear():
            return GgufRope(base | {f"{PREFIX}type": "linear", f"{PREFIX}factor": float(method.factor)}, {})
        case Yarn() if _has_usual_ramp(method):
            values: dict[str, str | int | float] = {
                f"{PREFIX}type": "yarn",
                f"{PREFIX}factor": float(method.factor),
                f"{PREFIX}original_context_length": method.original_max_position_embeddings,
            }
            # llama.cpp multiplies cos and sin by this formula and by attn_factor; it overwrites yarn_attn_factor.
            ratio = attention / (0.1 * math.log(method.factor) + 1)
            if not math.isclose(ratio, 1, rel_tol=2**-24):
                values[f"{PREFIX}attn_factor"] = ratio
            return GgufRope(base | values, {})
        case Yarn() | Llama3():
            _needs(architecture, method, (ONE,))
            unscaled = unscaled_inv_freq(method.rotary_dim, method.rope_theta)
            factors = (unscaled / method.frequencies().inv_freq).tolist()
            scaled = {} if attention == 1 else {f"{PREFIX}attn_factor": attention}
            return GgufRope(base | scaled, {ONE: factors})
        case LongRope():
            _needs(architecture, method, (LONG, SHORT))
            original, short = method.original_max_position_embeddings, method.switch_length
            differs = (
                f"llama.cpp takes the long factors if its context (-c) is above {original} tokens, and the short ones "
                f"otherwise; transformers goes by the length of each input, so inputs of up to {original} tokens "
                f"differ in a longer context and are right with -c {original}; {RIGHT_AT_EVERY_LENGTH}"
            )
            return GgufRope(
                base
                | {
                    f"{PREFIX}type": "longrope",
                    f"{PREFIX}original_context_length": original,
                    f"{PREFIX}attn_factor": float(attention),
                },
                {LONG: method.long_factor, SHORT: method.short_factor},
                () if short is None else (differs,),
                short,
            )
        case _:
            raise RopewalkError(
                f"llama.cpp does not implement {method.name!r}; extend either with a new rope_theta, 'linear' or "
                "'yarn' ('longrope' is possible for the architectures llama and phi3, and 'llama3' for llama)"
            )


def _has_usual_ramp(method: Yarn) -> bool:
    """Whether llama.cpp computes this ramp: it does not read its ends from a file, and always rounds them."""
    return method.truncate and (method.beta_fast, method.beta_slow) == (32, 1)


def _needs(architecture: str, method: RopeMethod, tensors: Sequence[str]) -> None:
    if set(tensors) <= set(READS[architecture]):
        return
    what, instead = method.name, "for llama.cpp, extend with yarn or a new rope_theta"
    if isinstance(method, Yarn):
        what, instead = (
            "yarn with truncate: false",
            "for llama.cpp, extend with truncate: true or a new rope_theta",
        )
        if method.truncate:
            what = f"yarn with beta_fast {method.beta_fast:g} and beta_slow {method.beta_slow:g}"
            instead = (
                f"use the file unchanged, and run llama-server with --yarn-beta-fast {method.beta_fast:g} "
                f"--yarn-beta-slow {method.beta_slow:g}"
            )
    raise RopewalkError(
        f"{what} needs the tensor {tensors[0]}, which llama.cpp does not load for the architecture {architecture}; "
        f"{instead}"
    )


def write_gguf(source: Path, config: ModelConfig, out: Path) -> GgufResult:
    """Copy a GGUF file and state the RoPE of a model's config in it, completely or not at all.

    Args:
        source: GGUF file that llama.cpp's converter made of this model, of any quantization.
        config: the model's config.
        out: a new file.

    Raises:
        RopewalkError: if a file cannot be read or written, the file is of another model, or llama.cpp cannot compute
            the model's RoPE.
    """
    gguf = _package()
    if out.exists() or out.is_symlink():
        raise RopewalkError(f"{out} already exists; give a new file with --out")
    try:
        _check_sizes(source)
        reader = gguf.GGUFReader(source)
        present = {name: field.contents() for name, field in reader.fields.items()}
        architecture = str(present["general.architecture"])
    except OSError as error:
        raise RopewalkError(f"cannot read {source}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError) as error:
        raise RopewalkError(f"{source} is not a readable GGUF file: {error}") from error
    method = _method_of_all_layers(config)
    _refuse_another_model(source, present, config, method)
    wanted = gguf_rope(method, architecture)
    metadata = {f"{architecture}.{key}": value for key, value in wanted.metadata.items()}
    if config.max_position_embeddings is not None:
        metadata[f"{architecture}.context_length"] = config.max_position_embeddings
    stale = {f"{architecture}.{PREFIX}{key}" for key in KEYS} - metadata.keys()
    with replacing(out) as partial:
        _copy(gguf, reader, partial, metadata, stale, wanted.tensors)
    changes = _changes(reader, present, metadata, stale, wanted.tensors)
    launch = _launch(out, config.max_position_embeddings, wanted.short)
    return GgufResult(source, out, architecture, method.name, tuple(changes), wanted.notes, launch)


SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type in the file; 8 is a string and 9 a list."""
STRING, LIST = 8, 9


def _check_sizes(source: Path) -> None:
    """Raise for metadata that would reach beyond the end of the file: the package would read it for ever.

    Raises:
        OSError: if the file cannot be read.
        ValueError: saying what is wrong.
    """
    with source.open("rb") as file, closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as data:
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        # The version is a small number, so its low half is zero only in the other byte order.
        order = "<" if data[4:6] != b"\0\0" else ">"
        place = 24

        def number(size: int) -> int:
            nonlocal place
            if place + size > len(data):
                raise ValueError("it ends within its metadata")
            place += size
            return int(struct.unpack_from(f"{order}{'BHIQ'[size.bit_length() - 1]}", data, place - size)[0])

        def skip(size: int) -> None:
            nonlocal place
            if size > len(data) - place:
                raise ValueError("its metadata states more bytes than the file has")
            place += size

        for _ in range(int(struct.unpack_from(f"{order}Q", data, 16)[0]) if len(data) >= place else 0):
            skip(number(8))
            kind, count = number(4), 1
            if kind == LIST:
                kind, count = number(4), number(8)
            if kind == STRING:
                for _ in range(count):
                    skip(number(8))
            elif kind in SIZES:
                skip(SIZES[kind] * count)
            else:
                raise ValueError(f"its metadata has a value of the unknown type {kind}")


def _launch(out: Path, length: int | None, short: int | None) -> dict[str, str]:
    server = f"llama-server -m {out}"
    whole = server if length is None else f"{server} -c {length}"
    if short is None:
        return {"it": whole}
    return {f"inputs above {short:,} tokens": whole, f"inputs up to {short:,} tokens": f"{server} -c {short}"}


def _package() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise RopewalkError(
            "--gguf needs the gguf package, which is not installed; run pip install 'ropewalk[gguf]'"
        ) from error
    return gguf


def _method_of_all_layers(config: ModelConfig) -> RopeMethod:
    methods = config.methods
    if len(set(methods.values())) != 1:
        kinds = ", ".join(f"{method.name} for {kind}" for kind, method in methods.items())
        raise RopewalkError(f"the model's layers have different RoPE ({kinds}), which --gguf cannot write")
    return next(iter(methods.values()))


def _refuse_another_model(
    source: Path, present: Mapping[str, Any], config: ModelConfig, method: RopeMethod
) -> None:
    """Raise if the file's shape is not the config's, before anything is written."""
    if present.get("split.count", 1) > 1:
        raise RopewalkError(
            f"{source} is one of several parts of a model; join the parts with: llama-gguf-split --merge"
        )
    architecture = present["general.architecture"]
    values = config.values
    shape = {
        "block_count": values.get("num_hidden_layers"),
        "embedding_length": values.get("hidden_size"),
        "attention.head_count": config.num_heads,
        "rope.dimension_count": method.rotary_dim,
    }
    for key, expected in shape.items():
        found = present.get(f"{architecture}.{key}")
        if found is not None and expected is not None and found != expected:
            raise RopewalkError(
                f"{source} was made from another model: its {architecture}.{key} is {found}, but the model's config "
                f"says {expected}; give the file of this model with --gguf"
            )


def _copy(
    gguf: Any,
    reader: Any,
    out: Path,
    metadata: Mapping[str, str | int | float],
    stale: set[str],
    tensors: Mapping[str, Sequence[float]],
) -> None:
    import numpy as np

    writer = gguf.GGUFWriter(
        out, reader.fields["general.architecture"].contents(), endianess=reader.endianess
    )
    with closing(writer):
        writer.data_alignment = reader.alignment
        added = dict(metadata)
        for name, field in reader.fields.items():
            # The writer makes these itself.
            if name.startswith("GGUF.") or name == "general.architecture" or name in stale:
                continue
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, added.pop(name, field.contents()), kind, sub_type=inner)
        kinds = {
            str: gguf.GGUFValueType.STRING,
            int: gguf.GGUFValueType.UINT32,
            float: gguf.GGUFValueType.FLOAT32,
        }
        for name, value in added.items():
            writer.add_key_value(name, value, kinds[type(value)])
        kept = [tensor for tensor in reader.tensors if tensor.name not in (ONE, LONG, SHORT)]
        for tensor in kept:
            writer.add_tensor_info(
                tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
            )
        new = {name: np.asarray(factors, dtype=np.float32) for name, factors in tensors.items()}
        for name, factors in new.items():
            writer.add_tensor_info(
                name, factors.shape, factors.dtype, factors.nbytes, gguf.GGMLQuantizationType.F32
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor in kept:
            writer.write_tensor_data(tensor.data, tensor_endianess=reader.endianess)
        for factors in new.values():
            writer.write_tensor_data(factors)


def _changes(
    reader: Any,
    present: Mapping[str, Any],
    metadata: Mapping[str, str | int | float],
    stale: set[str],
    tensors: Mapping[str, Sequence[float]],
) -> list[str]:
    """What a copy has that the source lacks, states otherwise, or should not have."""
    import numpy as np

    changes = []
    for key, value in metadata.items():
        before = present.get(key)
        # The file has float32.
        same = before == value or (isinstance(value, float) and before == float(np.float32(value)))
        if not same:
            changes.append(f"{key} {value:.7g}" if isinstance(value, float) else f"{key} {value}")
            changes[-1] += " (new)" if before is None else f" (was {before})"
    changes += [f"{key} removed (was {present[key]})" for key in sorted(stale) if key in present]
    there = {tensor.name: tensor.data for tensor in reader.tensors}
    for name, factors in tensors.items():
        wanted = np.asarray(factors, dtype=np.float32)
        if name not in there:
            changes.append(f"tensor {name} with {len(wanted)} factors (new)")
        elif not np.array_equal(there[name], wanted):
            changes.append(f"tensor {name} with {len(wanted)} other factors")
    changes += [
        f"tensor {name} removed" for name in (ONE, LONG, SHORT) if name in there and name not in tensors
    ]
    return changes
