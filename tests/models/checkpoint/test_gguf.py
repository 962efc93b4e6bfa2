"""A model's RoPE in a GGUF file: what is written, what llama.cpp computes of it, and what is refused."""

import random
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

gguf = pytest.importorskip("gguf", reason="needs the gguf package")

from benchmarks.llama_cpp import (  # noqa: E402
    CONTEXT,
    HEAD_DIM,
    IN_SHORT_CONTEXT,
    LENGTHS,
    METHODS,
    ORIGINAL,
    convert,
    divergences,
    tiny_model,
)
from ropewalk.compatibility.table import checkpoint_of, readings_of  # noqa: E402
from ropewalk.errors import RopewalkError  # noqa: E402
from ropewalk.models.checkpoint import gguf as written  # noqa: E402
from ropewalk.models.checkpoint.gguf import LONG, ONE, SHORT, gguf_rope, write_gguf  # noqa: E402
from ropewalk.models.config.file import config_from_json  # noqa: E402
from ropewalk.rope import Default, DynamicNtk, Linear, Llama3, LongRope, Yarn  # noqa: E402

THETA = 10000.0
YARN = Yarn(HEAD_DIM, THETA, 4.0, ORIGINAL)
LLAMA3 = Llama3(HEAD_DIM, THETA, 4.0, 1.0, 4.0, ORIGINAL)
LONGROPE = LongRope(HEAD_DIM, THETA, (1.0,) * 8, (1.0, 1.1, 1.3, 1.8, 2.5, 3.5, 4.0, 4.0), 1.2, ORIGINAL)
EXACT = 1e-4
"""Nats; wrong frequencies cost these models at least a hundred times as much."""


def frequencies(rope, rotary_dim=HEAD_DIM):
    """What ggml computes of a file without a ramp: inverse frequencies, and the factor on cos and sin."""
    theta = rope.metadata["rope.freq_base"] ** -(
        torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    )
    factors = torch.tensor(rope.tensors.get(ONE, [1.0] * (rotary_dim // 2)), dtype=torch.float64)
    scale = rope.metadata.get("rope.scaling.factor", 1.0) if "rope.scaling.type" in rope.metadata else 1.0
    return theta / factors / scale, rope.metadata.get("rope.scaling.attn_factor", 1.0)


@pytest.mark.parametrize(
    "method",
    [
        Default(HEAD_DIM, 5e5),
        Linear(HEAD_DIM, THETA, 4.0),
        LLAMA3,
        replace(YARN, truncate=False),
        replace(YARN, beta_fast=4.0, beta_slow=0.5, attention_factor=1.5),
    ],
    ids=lambda method: method.name,
)
def test_base_factor_and_tensor_make_the_frequencies_of_the_method(method):
    found, attention = frequencies(gguf_rope(method, "llama"))
    expected = method.frequencies()
    torch.testing.assert_close(found, expected.inv_freq, rtol=1e-14, atol=0)
    assert attention == pytest.approx(expected.attention_factor, rel=1e-14)


def test_yarn_states_its_attention_factor_relative_to_the_formula_that_llama_cpp_applies():
    assert "rope.scaling.attn_factor" not in gguf_rope(YARN, "qwen3").metadata
    stated = gguf_rope(replace(YARN, attention_factor=1.5), "qwen3").metadata["rope.scaling.attn_factor"]
    assert stated * (0.1 * np.log(4.0) + 1) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("method", "architecture", "message"),
    [
        (LLAMA3, "qwen2", "llama3 needs the tensor rope_freqs.weight"),
        (LONGROPE, "qwen3", "longrope needs the tensor rope_factors_long.weight"),
        (replace(YARN, truncate=False), "phi3", "yarn with truncate: false"),
        (replace(YARN, beta_fast=4.0), "qwen2", "--yarn-beta-fast 4 --yarn-beta-slow 1"),
        (YARN, "gemma3", "has tested yarn in llama.cpp only for .*, not for gemma3"),
        (DynamicNtk(HEAD_DIM, THETA, 4.0, ORIGINAL), "llama", "llama.cpp does not implement 'dynamic'"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused_by_name(method, architecture, message):
    with pytest.raises(RopewalkError, match=message):
        gguf_rope(method, architecture)


def test_a_plain_base_is_written_for_every_architecture():
    assert gguf_rope(Default(HEAD_DIM, 5e5), "gemma3").metadata == {"rope.freq_base": 5e5}


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """A model with longrope and its file as the converter writes it."""
    model = tiny_model("llama", METHODS["longrope"])
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    convert(model, path)
    return model, path, config_from_json(model.config.to_dict())


def contents(path):
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


def test_a_copy_has_the_factors_and_everything_else_as_it_was(converted, tmp_path):
    _, path, config = converted
    result = write_gguf(path, config, tmp_path / "new" / "out.gguf")
    before, weights = contents(path)
    after, corrected = contents(result.out)
    assert {key: value for key, value in after.items() if key in before} == before
    assert set(after) - set(before) == {
        "llama.rope.scaling.attn_factor",
        "llama.rope.scaling.original_context_length",
    }
    assert set(corrected) - set(weights) == {LONG, SHORT}
    assert all(np.array_equal(weights[name], corrected[name]) for name in weights)
    method = config.full_attention_rope
    np.testing.assert_array_equal(corrected[LONG], np.float32(method.long_factor))
    assert after["llama.rope.scaling.attn_factor"] == np.float32(method.attention_factor)
    assert [change.split(" ")[0] for change in result.changes].count("tensor") == 2
    assert f"above {ORIGINAL} tokens" in result.notes[0]


def test_a_corrected_file_needs_no_change(converted, tmp_path):
    _, path, config = converted
    first = write_gguf(path, config, tmp_path / "one.gguf")
    second = write_gguf(first.out, config, tmp_path / "two.gguf")
    assert second.changes == ()
    assert first.out.read_bytes() == second.out.read_bytes()


def test_what_the_method_does_not_need_is_removed(converted, tmp_path):
    """A file of a model that had longrope, and has a new base now."""
    model, path, config = converted
    first = write_gguf(path, config, tmp_path / "one.gguf")
    plain = model.config.to_dict() | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    result = write_gguf(first.out, config_from_json(plain), tmp_path / "two.gguf")
    fields, tensors = contents(result.out)
    assert not {LONG, SHORT} & set(tensors)
    assert [key for key in fields if ".rope.scaling." in key] == []
    assert fields["llama.rope.freq_base"] == 5e5
    assert f"tensor {LONG} removed" in result.changes


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 3, r"llama.block_count is 2, but the model's config says 3;"),
        ("head_dim", 32, r"llama.rope.dimension_count is 16, but the model's config says 32;"),
    ],
)
def test_a_file_of_another_model_is_refused(converted, tmp_path, key, value, message):
    model, path, _ = converted
    rope = {"rope_type": "default", "rope_theta": THETA}
    config = config_from_json(model.config.to_dict() | {"rope_parameters": rope, key: value})
    with pytest.raises(RopewalkError, match=message):
        write_gguf(path, config, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == []


def test_bad_files_are_refused_and_nothing_is_left(converted, tmp_path, monkeypatch):
    _, path, config = converted
    broken = tmp_path / "broken.gguf"
    for data in (b"", b"no such format", path.read_bytes()[:200]):
        broken.write_bytes(data)
        with pytest.raises(RopewalkError, match="is not a readable GGUF file"):
            write_gguf(broken, config, tmp_path / "out.gguf")
    with pytest.raises(RopewalkError, match="already exists"):
        write_gguf(path, config, broken)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(RopewalkError, match="No space left"):
        write_gguf(path, config, tmp_path / "out.gguf")
    assert list(tmp_path.iterdir()) == [broken]


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "theta"),
        ("llama", "linear"),
        ("llama", "yarn, attention_factor 1.5"),
        ("llama", "yarn, own ramp"),
        ("llama", "llama3"),
        ("llama", "longrope"),
        ("qwen3", "yarn, attention_factor 1.5"),
        ("phi3", "longrope"),
    ],
)
def test_llama_cpp_computes_what_transformers_computes(family, name, tmp_path):
    pytest.importorskip("xllamacpp", reason="needs the xllamacpp package, which has llama.cpp")
    model, source, out = tiny_model(family, METHODS[name]), tmp_path / "a.gguf", tmp_path / "b.gguf"
    convert(model, source)
    write_gguf(source, config_from_json(model.config.to_dict()), out)
    if name == "longrope":
        # A context beyond the original length takes the long factors, and one of the original length the short ones.
        found = divergences(model, out, LENGTHS[2:]) + divergences(model, out, IN_SHORT_CONTEXT, ORIGINAL)
    else:
        found = divergences(model, out, LENGTHS)
    assert max(map(abs, found)) < EXACT
    if name not in ("theta", "linear") and (family, name) != ("phi3", "longrope"):
        # As the converter writes it, the model is another one: the comparison would see it.
        assert max(divergences(model, source, LENGTHS[2:])) > 100 * EXACT


def test_llama_cpp_has_one_list_of_longrope_for_each_context_as_the_commands_say(converted, tmp_path):
    pytest.importorskip("xllamacpp", reason="needs the xllamacpp package, which has llama.cpp")
    model, source, config = converted
    result = write_gguf(source, config, tmp_path / "two.gguf")
    long, short = (int(command.split(" -c ")[1]) for command in result.launch.values())
    assert list(result.launch) == [f"inputs above {ORIGINAL} tokens", f"inputs up to {ORIGINAL} tokens"]
    assert max(map(abs, divergences(model, result.out, LENGTHS[2:], long))) < EXACT
    assert max(map(abs, divergences(model, result.out, IN_SHORT_CONTEXT, short))) < EXACT
    # What the note and the table of readers say of a long context.
    assert min(divergences(model, result.out, LENGTHS[:2], long)) > 100 * EXACT
    read = checkpoint_of({**model.config.to_dict()}, "m")
    (reading,) = (each for each in readings_of(read, "m") if each.key == "llama.cpp")
    assert (reading.short, reading.commands[1][1]) == (ORIGINAL, f"llama-server -m FILE.gguf -c {long}")
    assert reading.launch_short == f"llama-server -m FILE.gguf -c {short}"


def test_llama_cpp_computes_equal_lists_at_every_length(tmp_path):
    pytest.importorskip("xllamacpp", reason="needs the xllamacpp package, which has llama.cpp")
    model = tiny_model("llama", {**METHODS["longrope"], "short_factor": METHODS["longrope"]["long_factor"]})
    convert(model, tmp_path / "a.gguf")
    result = write_gguf(tmp_path / "a.gguf", config_from_json(model.config.to_dict()), tmp_path / "b.gguf")
    assert result.notes == ()
    assert result.launch == {"it": f"llama-server -m {result.out} -c {CONTEXT}"}
    assert max(map(abs, divergences(model, result.out, LENGTHS))) < EXACT


def test_damaged_files_are_copied_or_refused(converted, tmp_path):
    """Bytes of the header are overwritten, and files cut; nothing else than a refusal may come of it."""
    _, path, config = converted
    whole, draw, refused = path.read_bytes(), random.Random(0), 0
    header = gguf.GGUFReader(path).data_offset
    for _ in range(60):
        place = draw.randrange(4, header - 8)
        wrong = draw.choice(
            [draw.randbytes(1), draw.randbytes(4), struct.pack("<Q", 2**40), struct.pack("<I", 2**32 - 1)]
        )
        data = whole[:place] + wrong + whole[place + len(wrong) :]
        (tmp_path / "a.gguf").write_bytes(data if draw.random() < 0.8 else whole[:place])
        try:
            write_gguf(tmp_path / "a.gguf", config, tmp_path / "b.gguf")
            (tmp_path / "b.gguf").unlink()
        except RopewalkError:
            refused += 1
    assert refused > 30
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.gguf"]


def test_the_package_is_named_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(RopewalkError, match=r"pip install 'ropewalk\[gguf\]'"):
        written.write_gguf(Path("a.gguf"), None, tmp_path / "out.gguf")
