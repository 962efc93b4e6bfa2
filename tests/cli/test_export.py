"""``ropewalk export`` and ``ropewalk eval --rope``: a factor table on a tiny checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ropewalk.cli import app as program
from ropewalk.compatibility import READERS
from ropewalk.data import load_tokenizer
from ropewalk.evaluation.rows import rows_of
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.load import load_model
from ropewalk.models.rope.rotary import rope_of
from ropewalk.rope import LongRope, longrope_attention_factor, methods_from_config
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.cli.export_command_cases import command
from tests.evaluation.evaluation_cases import perplexity_by_position

Run = Callable[..., int]
Write = Callable[..., Path]

ORIGINAL, TARGET = 64, 256
PUBLISHED = longrope_attention_factor(TARGET / ORIGINAL, ORIGINAL)
SHORT, LONG = (1.0, 1.0, 1.1, 1.2), (1.0, 1.8, 3.0, 4.5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_byte_checkpoint(tmp_path_factory.mktemp("models") / "tiny", ORIGINAL, 0.3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = ORIGINAL
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " + "abc " * 100}) + "\n" for n in range(6)))
    return path


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """A factor table for the checkpoint, or one that differs."""

    def written(name: str = "factors.json", **more: Any) -> Path:
        model = {"name": "tiny", "rotary_dim": 8, "rope_theta": 10000.0}
        model["original_max_position_embeddings"] = ORIGINAL
        model |= more.pop("model", {})
        table = {
            "format": "ropewalk-factors/1",
            "model": model,
            "target_length": TARGET,
            "long_factor": LONG,
            "attention_factor": PUBLISHED,
            "provenance": {"kind": "search", "source": "a test"},
            **more,
        }
        (tmp_path / name).write_text(json.dumps(table))
        return tmp_path / name

    return written


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda *arguments: program.main([*map(str, arguments)])


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_a_folder_is_written_with_the_factors_and_everything_else_as_it_was(
    run: Run, write: Write, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "new"
    assert run("export", checkpoint, "--rope", write(short_factor=SHORT), "--out", out, "--json") == 0
    found = said(capsys)
    assert found["factors"]["provenance"] == {"kind": "search", "source": "a test"}
    assert len(found["factors"]["sha256"]) == 64
    assert (found["model"], found["out"]) == (str(checkpoint), str(out))
    assert (found["max_position_embeddings"], found["original_max_position_embeddings"]) == (TARGET, ORIGINAL)
    assert (tuple(found["short_factor"]), tuple(found["long_factor"])) == (SHORT, LONG)
    assert found["attention_factor"] == PUBLISHED
    config = json.loads((out / "config.json").read_text())
    assert config["rope_parameters"] == {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": list(SHORT),
        "long_factor": list(LONG),
        "attention_factor": PUBLISHED,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    }
    before = AutoConfig.from_pretrained(checkpoint).to_dict()
    after = AutoConfig.from_pretrained(out).to_dict()
    changed = {key for key in {*before, *after} if before.get(key) != after.get(key)}
    assert changed == {
        "rope_parameters",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "_name_or_path",
    }
    assert after["max_position_embeddings"] == TARGET
    old, new = (load_file(folder / "model.safetensors") for folder in (checkpoint, out))
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert torch.equal(weight, new[name])
    assert AutoTokenizer.from_pretrained(out).model_max_length == TARGET
    assert (out / "tokenizer.json").read_text() == (checkpoint / "tokenizer.json").read_text()
    # Nothing lies around, and the folder is a model for plain transformers.
    assert [each.name for each in out.parent.iterdir()] == ["new"]
    with torch.no_grad():
        assert AutoModelForCausalLM.from_pretrained(out)(torch.arange(100)[None]).logits.isfinite().all()


def test_what_other_programs_do_otherwise_is_said(
    run: Run, write: Write, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def readers(name: str, **more: Any) -> dict[str, tuple[str, str]]:
        assert run("export", checkpoint, "--rope", write(**more), "--out", tmp_path / name, "--json") == 0
        return {each["key"]: (each["verdict"], each["detail"]) for each in said(capsys)["readers"]}

    both = readers("both", short_factor=SHORT)
    assert both["vllm"][0] == both["mlx-lm"][0] == "long inputs only"
    assert both["vllm"][1].startswith(f"takes the long factors also for inputs of up to {ORIGINAL} tokens")
    assert both["transformers"][1].startswith(f"the factors change when a sequence passes {ORIGINAL} tokens")
    assert both["llama.cpp"][0] == "with an option"
    one = readers("one", short_factor=LONG)
    assert {key for key, read in one.items() if read != ("same", "")} == {"llama.cpp"}
    odd = readers("odd", short_factor=LONG, attention_factor=1.0)
    assert odd["mlx-lm"] == ("differs", f"attention factor {PUBLISHED:.6g}, not 1")
    assert {odd[key][0] for key in ("transformers", "transformers-4", "vllm", "sglang")} == {"same"}
    entry = json.loads((tmp_path / "odd" / "config.json").read_text())["rope_parameters"]
    assert (entry["short_mscale"], entry["long_mscale"]) == (1.0, 1.0)
    assert run("export", checkpoint, "--rope", write(), "--out", tmp_path / "shown") == 0
    shown = capsys.readouterr().out
    assert f"longrope, {ORIGINAL} to {TARGET} tokens" in shown
    assert f"from_pretrained('{tmp_path / 'shown'}') loads it" in shown


@pytest.mark.slow
def test_factors_of_another_checkpoint_are_noted(
    run: Run, write: Write, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = (
        "the factors were found on another checkpoint (elsewhere) with the same frequencies; they may not be optimal "
        "for this one"
    )
    digests = {"other": "0" * 64, "own": model_digest(str(checkpoint)), "unknown": None}
    for name, digest in digests.items():
        table = write(short_factor=LONG, model={"name": "elsewhere", "digest": digest})
        assert run("export", checkpoint, "--rope", table, "--out", tmp_path / name, "--json") == 0
        notes = said(capsys)["notes"]
        assert notes == ([note] if name == "other" else [])
        assert run("eval", checkpoint, "--rope", table, *asked(text, "--out", tmp_path / f"{name}-eval")) == 0
        printed = capsys.readouterr()
        found = json.loads(printed.out)
        assert found.get("notes", []) == ([note] if name == "other" else [])
        assert found["rope"]["found_on"] == {"name": "elsewhere", "sha256": digest}
        assert (note in printed.err) == (name == "other")
        assert json.loads((tmp_path / f"{name}-eval" / "results.json").read_text()).get("notes") == found.get(
            "notes"
        )


def test_an_exported_folder_is_extended_again_from_its_first_length(
    run: Run, write: Write, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    assert run("export", checkpoint, "--rope", write(short_factor=SHORT), "--out", first) == 0
    longer = write("longer.json", target_length=1024, long_factor=(1.0, 2.0, 9.0, 17.0), attention_factor=1.3)
    assert run("export", first, "--rope", longer, "--out", second) == 0
    config = AutoConfig.from_pretrained(second)
    expected = LongRope(8, 1e4, SHORT, (1.0, 2.0, 9.0, 17.0), 1.3, ORIGINAL)
    assert methods_from_config(config.to_dict()) == {None: expected}
    assert config.max_position_embeddings == 1024
    # Short factors alone change neither the length nor the long ones.
    short = write(
        "short.json",
        target_length=ORIGINAL,
        long_factor=None,
        short_factor=(1, 1, 1, 1.5),
        attention_factor=1.3,
    )
    assert run("export", second, "--rope", short, "--out", third) == 0
    config = AutoConfig.from_pretrained(third)
    (method,) = methods_from_config(config.to_dict()).values()
    assert method == LongRope(8, 1e4, (1.0, 1.0, 1.0, 1.5), expected.long_factor, 1.3, ORIGINAL)
    assert config.max_position_embeddings == 1024
    capsys.readouterr()
    assert run("inspect", second, "--json") == 0
    found = said(capsys)
    assert found["trained_length"] == 1024
    assert found["notes"] == []
    assert found["methods"][0]["attention_factor"] == 1.3
    assert found["methods"][0]["loaded"]["attention_factor"] == 1.3
    # The short factors, as they are loaded, to within transformers' float32.
    assert found["methods"][0]["loaded"]["largest_relative_difference"] < 6 * 2**-24


def test_a_length_that_is_no_round_multiple_gives_no_warning(
    run: Run, write: Write, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 49}))
    table = write(model={"original_max_position_embeddings": 49}, target_length=99)
    # The quotient of these two, times the first, is not the second in floating point.
    assert 99 / 49 * 49 != 99
    assert run("export", folder, "--rope", table, "--out", tmp_path / "new") == 0
    capsys.readouterr()
    assert run("inspect", tmp_path / "new", "--json") == 0
    assert said(capsys)["notes"] == []


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"start_tokens": 4},
            "has 4 start tokens, which config.json cannot store; search again with --start-tokens "
            "0, or evaluate without an export: ropewalk eval",
        ),
        ({"model": {"rope_theta": 500000.0}}, "rope_theta 500000"),
        ({"model": {"original_max_position_embeddings": 128}}, "original_max_position_embeddings 128"),
        ({"target_length": ORIGINAL}, f"long factors for {ORIGINAL} tokens, but "),
        ({"long_factor": None, "short_factor": SHORT}, "only short factors"),
        ({"format": "other"}, "is not a ropewalk factor table"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    run: Run,
    write: Write,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    table: dict[str, Any],
    message: str,
) -> None:
    assert run("export", checkpoint, "--rope", write(**table), "--out", tmp_path / "new") == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert [each.name for each in tmp_path.iterdir()] == ["factors.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            (),
            "nothing to export; give --push OWNER/NAME to publish a model, --step N --out DIR to write",
        ),
        (("--rope", "factors.json"), "--rope needs --out DIR"),
        (("--out", "new"), "--out needs either --rope FILE"),
        (("--rope", "factors.json", "--out", "new", "--public"), "--public needs --push OWNER/NAME"),
        (("--push", "mine"), "--push 'mine' is not the name of a repository"),
        (("--push", "me/mine"), "--push me/mine needs a Hugging Face token"),
        (("--rope", "factors.json", "--out", "new", "--push", "me/mine"), "needs a Hugging Face token"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert run("export", checkpoint, *options) == 2
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


class Hub:
    """A Hub that keeps what is uploaded."""

    endpoint = "https://hub"

    def __init__(self, **_: Any) -> None:
        self.files = HUB

    def whoami(self) -> dict[str, Any]:
        return {"name": "me"}

    def repo_exists(self, name: str) -> bool:
        return False

    def create_repo(self, name: str, private: bool, exist_ok: bool) -> None:
        assert private
        assert exist_ok

    def preupload_lfs_files(self, name: str, additions: list[Any]) -> None:
        assert len(additions) == 1

    def create_commit(self, name: str, operations: list[Any], commit_message: str) -> None:
        self.files.update({each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in operations})


HUB: dict[str, bytes] = {}


def test_a_table_is_written_with_a_card_and_pushed(
    run: Run,
    write: Write,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    HUB.clear()
    out = tmp_path / "new"
    assert run("export", checkpoint, "--rope", write(), "--out", out, "--push", "me/mine") == 0
    told = capsys.readouterr()
    assert f"pushed {len(HUB)} files, {sum(map(len, HUB.values())):,} bytes, from {out}" in told.out
    assert "url    https://hub/me/mine (private)" in told.out
    assert "hf_secret" not in told.out + told.err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == HUB
    card = HUB["README.md"].decode()
    assert f"| context in tokens | {ORIGINAL} | {TARGET} |" in card
    assert "nothing was trained" in card
    assert f"vllm serve me/mine --max-model-len {TARGET}" in card
    assert str(tmp_path) not in card
    assert run("export", out, "--push", "me/mine", "--json") == 0
    pushed = said(capsys)["push"]
    assert (pushed["url"], pushed["private"], sorted(pushed["files"])) == (
        "https://hub/me/mine",
        True,
        sorted(HUB),
    )


def test_nothing_that_exists_is_written_over(
    run: Run, write: Write, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("folder", "link"):
        place = tmp_path / name
        if name == "folder":
            place.mkdir()
        else:
            place.symlink_to(tmp_path / "nowhere")
        assert run("export", checkpoint, "--rope", write(), "--out", place) == 2
        assert f"{place} already exists; give a new folder with --out" in capsys.readouterr().err
    assert list((tmp_path / "folder").iterdir()) == []
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    assert run("export", broken, "--rope", write(), "--out", tmp_path / "new") == 2
    assert "cannot load the model" in capsys.readouterr().err
    assert not any(each.name.startswith((".new", "new")) for each in tmp_path.iterdir())


def asked(text: Path, *more: object) -> list[object]:
    options = ["--suite", "perplexity", "--text", text, "--rows", 2, "--device", "cpu", "--json"]
    return [*options, *more]


def perplexities(run: Run, capsys: pytest.CaptureFixture[str], *arguments: object) -> list[float]:
    assert run("eval", *arguments) == 0
    return [result["score"] for result in said(capsys)["results"]]


def test_a_table_and_its_export_measure_the_same(
    run: Run, write: Write, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(short_factor=SHORT)
    lengths = asked(text, "--lengths", f"{ORIGINAL},{TARGET}")
    under = perplexities(run, capsys, checkpoint, "--rope", table, *lengths)
    assert run("export", checkpoint, "--rope", table, "--out", tmp_path / "new") == 0
    capsys.readouterr()
    assert perplexities(run, capsys, tmp_path / "new", *lengths) == under
    plain = perplexities(run, capsys, checkpoint, "--beyond-config", *lengths)
    assert all(abs(a / b - 1) > 1e-3 for a, b in zip(under, plain, strict=True))


def test_start_tokens_are_measured_too_and_the_record_names_the_table(
    run: Run, write: Write, checkpoint: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(start_tokens=20, attention_factor=1.25)
    # The length is the table's.
    assert run("eval", checkpoint, "--rope", table, *asked(text)) == 0
    found = said(capsys)
    assert found["lengths"] == [TARGET]
    assert found["rope"]["provenance"] == {"kind": "search", "source": "a test"}
    assert {key: found["rope"][key] for key in ("start_tokens", "attention_factor", "target_length")} == {
        "start_tokens": 20,
        "attention_factor": 1.25,
        "target_length": TARGET,
    }
    (result,) = found["results"]
    assert not result["details"].get("beyond_config")
    rows = rows_of(str(text), load_tokenizer(str(checkpoint)), TARGET, 2, seed=0)
    rope = LongRope(8, 1e4, (1.0,) * 4, LONG, 1.25, ORIGINAL)
    model = load_model(checkpoint)
    head = OutputHead.of(model)
    for start_tokens, same in ((20, True), (0, False)):
        with rope_of(model, replace(rope, start_tokens=start_tokens)):
            score = perplexity_by_position(model, head, rows, [0, TARGET]).overall.perplexity
        assert (score == pytest.approx(result["score"], rel=1e-6)) == same


def test_results_of_two_tables_are_not_taken_for_the_same(
    run: Run, write: Write, checkpoint: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results"
    table = write()
    options = asked(text, "--lengths", TARGET, "--out", out)
    assert run("eval", checkpoint, "--rope", table, *options) == 0
    first = said(capsys)
    assert json.loads((out / "results.json").read_text())["rope"] == first["rope"]
    for other in (("--rope", write("other.json", long_factor=(1.0, 2.0, 3.0, 4.0))), ("--beyond-config",)):
        assert run("eval", checkpoint, *other, *options) == 2
        assert "contains a different evaluation, which differs in " in capsys.readouterr().err
    # The same table under another name is the same table.
    assert run("eval", checkpoint, "--rope", table.rename(tmp_path / "moved.json"), *options) == 0
    assert said(capsys)["results"] == first["results"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--server", "http://localhost:1/v1"),
            "has no effect on a server, which uses the factors in its own checkpoint",
        ),
        (("--no-exact-rope",), "start_tokens above 0"),
    ],
)
def test_what_cannot_run_a_table_is_refused(
    run: Run,
    write: Write,
    checkpoint: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    message: str,
) -> None:
    assert run("eval", checkpoint, "--rope", write(start_tokens=4), *asked(text), *options) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_several_processes_measure_the_same(
    two_ranks: Any,
    run: Run,
    write: Write,
    checkpoint: Path,
    text: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = write(short_factor=SHORT, start_tokens=5)
    options = [checkpoint, "--rope", table, *asked(text, "--lengths", f"{ORIGINAL},{TARGET}")]
    alone = perplexities(run, capsys, *options)
    (status, out), _ = two_ranks.run(command, [*map(str, ["eval", *options, "--parallel", "ring=2"])])
    assert status == 0
    found = json.loads(out)
    assert found["rope"]["start_tokens"] == 5
    # Losses of about 4 nats in float32 differ by 1e-6 each where products have other shapes.
    assert [result["score"] for result in found["results"]] == pytest.approx(alone, rel=1e-5)


def test_a_checkpoint_that_a_named_program_reads_wrongly_is_not_written(
    run: Run, write: Write, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = write(short_factor=LONG, attention_factor=1.0)
    for reader, words in (
        ("mlx-lm", "mlx-lm 0.32 computes this RoPE wrongly (attention factor"),
        ("ollama", "unknown program 'ollama'; choose from transformers, "),
    ):
        asked_for = ("--rope", table, "--out", tmp_path / "out", "--for", "vllm", "--for", reader)
        assert run("export", checkpoint, *asked_for) == 2
        assert words in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert run("export", checkpoint, "--rope", table, "--out", tmp_path / "out", "--for", "vllm") == 0
    printed = capsys.readouterr().out
    assert "RoPE of the checkpoint in other programs" in printed
    assert f"vllm serve {tmp_path / 'out'} --max-model-len {TARGET}" in printed
    assert run("export", checkpoint, "--gguf", table, "--out", tmp_path / "x", "--for", "llama.cpp") == 2
    assert "--for and --gguf cannot be combined" in capsys.readouterr().err


def test_a_named_program_with_a_command_for_each_length_is_told_both_and_one_without_is_refused(
    run: Run, write: Write, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked_for = ("export", checkpoint, "--rope", write(short_factor=SHORT), "--out", out, "--for", "vllm")
    assert run(*asked_for, "--for", "mlx-lm") == 2
    refused = " ".join(capsys.readouterr().err.split())
    assert "mlx-lm 0.32 computes this RoPE wrongly (takes the long factors also for" in refused
    assert run(*asked_for, "--for", "llama.cpp", "--json") == 0
    vllm, llama_cpp = said(capsys)["notes"][-2:]
    for length in (ORIGINAL, TARGET):
        assert f"vllm serve {out} --max-model-len {length}" in vllm
        assert f"llama-server -m FILE.gguf -c {length}" in llama_cpp


def test_help_names_every_program_that_for_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert program.main(["export", "--help"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "--for PROGRAM" in line)
    named = line.partition("wrongly: ")[2].partition(". ")[0]
    assert named.replace(" or ", ", ").split(", ") == [each.key for each in READERS]
