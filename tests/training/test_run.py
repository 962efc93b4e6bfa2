"""Whole runs: end to end, killed and resumed, and everything that is refused before the work starts."""

import json
import resource
import signal
import time
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from ropewalk import RopewalkError, load_model
from ropewalk.cli.app import main
from ropewalk.io.progress import Silent
from ropewalk.training.metrics import LOST
from ropewalk.training.preflight import resolve
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe
from tests.marks import slow_after
from tests.programs import ROPEWALK, Program
from tests.training.run_cases import extend
from tests.training.tiny import save_tokenizer


def recipe_of(values) -> Recipe:
    return parse_recipe(yaml.safe_dump(values), "test")


def losses(output: Path) -> list[tuple[int, int, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["stage"], line["step"], line["loss"]) for line in lines]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_checkpoint, tiny_documents):
    """One finished run of two stages, and its summary."""
    values = {
        "model": str(tiny_checkpoint),
        "output": str(tmp_path_factory.mktemp("runs") / "finished"),
        "data": {"sources": [str(tiny_documents)], "validation_documents": 30},
        "stages": [
            {"context": 64, "steps": 20, "rows_per_step": 4, "learning_rate": 1e-2, "pattern": "full"},
            {"context": 128, "steps": 20, "rows_per_step": 4, "learning_rate": 1e-2, "pattern": "anchor"},
        ],
        "evaluation": {"suites": ["perplexity"], "rows": 4},
    }
    return values, extend(recipe_of(values))


def test_a_run_of_two_stages_lowers_the_perplexity(finished):
    values, summary = finished
    before, after = summary["before"][0], summary["after"][0]
    # 16 tokens at random: a perplexity of about 16 before, clearly less once the order is learnt.
    assert 14 < before["score"] < 19
    assert after["ci95"][1] < 0.75 * before["ci95"][0]
    assert [stage["context"] for stage in summary["stages"]] == [64, 128]
    assert len(losses(Path(values["output"]))) == 40


def test_the_saved_model_carries_its_new_rope_and_context(finished):
    _, summary = finished
    config = json.loads((Path(summary["model"]) / "config.json").read_text())
    assert config["max_position_embeddings"] == 128
    assert config["rope_parameters"]["rope_theta"] == summary["stages"][1]["rope_theta"] > 1e4
    assert transformers.AutoTokenizer.from_pretrained(summary["model"]).bos_token == "<s>"


def test_plain_transformers_gives_the_logits_that_ours_gives(finished):
    _, summary = finished
    ids = torch.randint(0, 16, (1, 128), generator=torch.Generator().manual_seed(0))
    plain = transformers.AutoModelForCausalLM.from_pretrained(summary["model"])
    ours = load_model(summary["model"])
    with torch.no_grad():
        difference = (plain(ids).logits - ours(ids).logits).abs().max()
    # Angles of up to 128 rad rounded to float32, through two layers, against exact ones.
    assert difference < 1e-4


def test_a_finished_run_resumed_gives_its_summary_again(finished):
    values, summary = finished
    again = extend(recipe_of(values), resume=True)
    assert again["after"] == summary["after"]
    assert len(losses(Path(values["output"]))) == 40


def test_a_resumed_run_does_not_go_on_without_the_steps_that_it_has_done(finished):
    values, _ = finished
    path = Path(values["output"]) / "metrics.jsonl"
    content = path.read_bytes()
    lost, notes = path.with_name(LOST), []

    class Reporter(Silent):
        def note(self, text):
            notes.append(text)

    class Reached(Exception):
        pass

    def resume():
        with pytest.MonkeyPatch.context() as patch:
            # What comes after training is not of interest here.
            patch.setattr("ropewalk.training.run.summary", lambda *_: (_ for _ in ()).throw(Reached))
            extend(recipe_of(values), resume=True, reporter=Reporter())

    try:
        lines = content.splitlines(keepends=True)
        path.write_bytes(lines[0] + b"\xff" + b"".join(lines[1:]))
        with pytest.raises(RopewalkError, match=f"line 2 of {path} is damaged: 'utf-8'"):
            resume()
        path.unlink()
        with pytest.raises(
            RopewalkError, match="lacks 40 of the 40 completed steps \\(the first is step 1 of stage 1\\)"
        ):
            resume()
        path.write_bytes(b"".join(lines[:30]))
        with pytest.raises(
            RopewalkError, match="lacks 10 of the 40 completed steps \\(the first is step 11 of stage 2\\)"
        ):
            resume()
        lost.touch()
        with pytest.raises(Reached):
            resume()
        assert [note for note in notes if f"which {LOST} allows" in note]
    finally:
        lost.unlink(missing_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
def test_each_precision_trains_and_saves_in_the_checkpoints_dtype(recipe_values, precision):
    summary = extend(recipe_of({**recipe_values, "precision": precision}))
    assert all(loss is not None for _, _, loss in losses(Path(summary["output"])))
    assert load_model(summary["model"]).dtype == torch.float32


@pytest.mark.parametrize(
    "stage",
    slow_after(
        3,
        [
            {"pattern": "intra_document"},
            {"pattern": "intra_document", "positions": "reset"},
            {"rope": {"method": "yarn"}},
            {"rope": {"method": "ntk"}, "gradient_checkpointing": True, "rows_per_batch": 2},
        ],
    ),
)
def test_every_pattern_and_method_trains(recipe_values, stage):
    """The patterns of the finished run are full and anchor."""
    recipe_values["stages"][0].update(stage)
    recipe_values["evaluation"]["suites"] = []
    summary = extend(recipe_of(recipe_values))
    found = [loss for _, _, loss in losses(Path(summary["output"]))]
    assert found[-1] < found[0]


def test_killed_and_resumed_the_losses_are_the_same_to_the_last_bit(recipe_values, tmp_path, capsys):
    stage = {**recipe_values["stages"][0], "steps": 6}
    values = {**recipe_values, "stages": [stage, {**stage, "context": 256}]}
    whole = {**values, "output": str(tmp_path / "whole")}
    extend(recipe_of(whole))
    expected = losses(tmp_path / "whole")
    file = write(tmp_path / "recipe.yaml", values)
    output = Path(values["output"])
    options: list[str] = []
    for kill_after in (3, 8):
        process = Program(ROPEWALK, "extend", file, *options)
        while process.poll() is None:
            metrics = output / "metrics.jsonl"
            if metrics.exists() and metrics.read_text().count("\n") >= kill_after:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        options = ["--resume"]
    assert main(["extend", file, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 256
    assert losses(output) == expected
    leftovers = [p for p in output.rglob("*") if ".partial" in p.name or ".old" in p.name]
    assert leftovers == []


class CutOff(BaseException):
    """Stands for the end of the process: nothing may catch it."""


@pytest.mark.slow
def test_cut_off_and_resumed_in_bfloat16_the_losses_are_the_same_to_the_last_bit(
    recipe_values, tmp_path, monkeypatch
):
    """What goes on is the float32 masters, from the middle of either stage."""
    import ropewalk.training.stage as stage

    (first,) = recipe_values["stages"]
    values = {**recipe_values, "precision": "bfloat16", "stages": [first, {**first, "context": 256}]}
    extend(recipe_of({**values, "output": str(tmp_path / "whole")}))
    step, left = stage.train_step, []

    def steps(*arguments):
        if not left.pop():
            raise CutOff
        return step(*arguments)

    monkeypatch.setattr(stage, "train_step", steps)
    for number, resume in ((3, False), (6, True)):
        left[:] = [False, *[True] * number]
        with pytest.raises(CutOff):
            extend(recipe_of(values), resume=resume)
    left[:] = [True] * 12
    extend(recipe_of(values), resume=True)
    # Three steps, of which two are saved; six more, to the second of the next stage.
    assert len(left) == 12 - 4
    assert losses(Path(values["output"])) == losses(tmp_path / "whole")


def refused(capsys, *arguments: str) -> str:
    """The one sentence that a refused command prints, with exit status 2."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    assert status == 2, captured.err
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, captured.err
    return lines[0]


def write(path: Path, values) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=./missing", "there is no folder or file ./missing"),
        (
            "stages.0.context=32",
            "stages.0.context must be longer than the trained length of 32 tokens, got 32",
        ),
        ("stages.0.contxt=64", "unknown key stages.0.contxt; did you mean context?"),
        ("engine=varlen", "engine varlen needs CUDA"),
        ("engine=flex", "engine flex has no backward on cpu"),
        ("device=cuda", "sees no CUDA device"),
        ("stages.0.rope.factor=2", "factor"),
        ("stages.0.rope.rope_theta=0.5", "0.5"),
        ("stages.0.rope={method: longrope}", "stages.0.rope: longrope needs factors"),
        ("stages.0.rope={method: default, rope_theta: 1e5}", "rope_theta"),
        ("data.sources=[missing.jsonl]", "missing.jsonl"),
        ("trackers=[aim]", "tracker aim is not installed"),
        ("data.validation_documents=0", "the evaluation needs held-out documents, but there are none"),
        ("evaluation.suites=[rulr]", "unknown evaluation.suites.0 'rulr'; did you mean ruler?"),
        ("stages.0.context=1M", "tokens"),
    ],
)
def test_bad_recipes_are_refused_before_anything_is_trained(
    recipe_values, tmp_path, capsys, override, message
):
    if torch.cuda.is_available() and ("CUDA" in message or "cpu" in message):
        pytest.skip("this machine has a CUDA device")
    file = write(tmp_path / "recipe.yaml", recipe_values)
    assert message in refused(capsys, "extend", file, "--set", override)
    output = Path(recipe_values["output"])
    assert not (output / "checkpoints").exists()
    assert not (output / "model").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "tar hemp"}\n{"text": \n', "documents.jsonl:2"),
        (b'{"text": "tar \xff"}\n', "UTF-8"),
        (b'{"body": "tar"}\n', "body"),
        (b"", "no documents"),
    ],
)
def test_bad_documents_are_refused_by_name(recipe_values, tmp_path, capsys, content, message):
    documents = tmp_path / "documents.jsonl"
    documents.write_bytes(content)
    recipe_values["data"]["sources"] = [str(documents)]
    file = write(tmp_path / "recipe.yaml", recipe_values)
    assert message in refused(capsys, "extend", file)


def test_an_empty_folder_of_documents_is_refused(recipe_values, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    recipe_values["data"]["sources"] = [str(tmp_path / "empty")]
    file = write(tmp_path / "recipe.yaml", recipe_values)
    assert "empty" in refused(capsys, "extend", file)


def altered(checkpoint: Path, folder: Path, **changes) -> str:
    """A copy of a checkpoint with changed config keys."""
    import shutil

    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    config.update(changes)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return str(folder)


def test_a_checkpoint_without_rope_is_refused(recipe_values, tmp_path, capsys):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    file = write(tmp_path / "recipe.yaml", {**recipe_values, "model": str(tmp_path / "gpt2")})
    assert "RoPE" in refused(capsys, "extend", file)


def test_a_tokenizer_without_bos_and_eos_is_refused(recipe_values, tiny_checkpoint, tmp_path, capsys):
    model = altered(tiny_checkpoint, tmp_path / "model")
    save_tokenizer(model, bos=None, eos=None)
    file = write(tmp_path / "recipe.yaml", {**recipe_values, "model": model})
    assert "neither a BOS nor an EOS token" in refused(capsys, "extend", file)


def test_attention_dropout_and_sliding_windows_are_refused(recipe_values, tiny_checkpoint, tmp_path, capsys):
    for name, changes, message in (
        ("dropout", {"attention_dropout": 0.1}, "attention dropout 0.1"),
        (
            "window",
            {"model_type": "mistral", "sliding_window": 64},
            "a sliding window of 64 tokens in every layer",
        ),
    ):
        model = altered(tiny_checkpoint, tmp_path / name, **changes)
        file = write(tmp_path / f"{name}.yaml", {**recipe_values, "model": model})
        assert message in refused(capsys, "extend", file)


def test_an_output_that_is_taken_is_refused_and_untouched(finished, tmp_path, capsys):
    values, _ = finished
    file = write(tmp_path / "recipe.yaml", values)
    assert "add --resume" in refused(capsys, "extend", file)
    assert len(losses(Path(values["output"]))) == 40


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(
    recipe_values, tmp_path, capsys, monkeypatch, asynchronous
):
    """A limit on the size of a file stands for the full disk: the weights no longer fit, small files do."""
    from ropewalk.training.checkpoint.single import WholeCheckpoints

    write_checkpoint = WholeCheckpoints._write

    def full(writer, position, state, best):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if position.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
        try:
            write_checkpoint(writer, position, state, best)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    recipe_values["checkpoints"]["asynchronous"] = asynchronous
    file = write(tmp_path / "recipe.yaml", recipe_values)
    with monkeypatch.context() as patch:
        patch.setattr(WholeCheckpoints, "_write", full)
        said = refused(capsys, "extend", file)
    assert said.startswith("error: cannot write")
    assert "stage0-step000004" in said
    output = Path(recipe_values["output"])
    assert [p.name for p in (output / "checkpoints").iterdir()] == ["stage0-step000002"]
    assert main(["extend", file, "--resume"]) == 0
    assert [step for _, step, _ in losses(output)] == [1, 2, 3, 4, 5, 6]


def test_a_loss_that_stays_infinite_ends_the_run_with_status_1(recipe_values, tmp_path, capsys):
    recipe_values["stages"][0].update(learning_rate=1e30, steps=20)
    file = write(tmp_path / "recipe.yaml", recipe_values)
    assert main(["extend", file]) == 1
    assert "was not finite in steps 2 to 4 of stage 1; resume" in capsys.readouterr().err


def test_tensorboard_gets_the_metrics(recipe_values):
    pytest.importorskip("tensorboard")
    summary = extend(recipe_of({**recipe_values, "trackers": ["tensorboard"]}))
    assert list((Path(summary["output"]) / "trackers").rglob("events.*"))


def test_starting_tokens_cannot_be_exported(recipe_values):
    factors = {"short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 2, 4], "start_tokens": 4}
    recipe_values["stages"][0]["rope"] = {"method": "longrope", **factors}
    with pytest.raises(RopewalkError, match="a transformers config cannot store start_tokens 4"):
        extend(recipe_of(recipe_values))


def test_checkpoints_carry_context_and_float32_masters(recipe_values):
    """In bfloat16 the result must come from the masters: most of them are no bfloat16 numbers."""
    recipe_values["precision"] = "bfloat16"
    summary = extend(recipe_of(recipe_values))
    for folder in (Path(summary["output"]) / "checkpoints").iterdir():
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 128
    for weights in [Path(summary["model"]), *(Path(summary["output"]) / "checkpoints").iterdir()]:
        matrix = load_file(weights / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
        assert matrix.dtype == torch.float32
        assert (matrix != matrix.bfloat16().float()).float().mean() > 0.9


def test_tokens_and_steps_count_on_through_the_stages(finished):
    values, _ = finished
    lines = (Path(values["output"]) / "metrics.jsonl").read_text().splitlines()
    tokens = [json.loads(line)["tokens"] for line in lines]
    assert tokens[19:22] == [20 * 4 * 64, 20 * 4 * 64 + 4 * 128, 20 * 4 * 64 + 8 * 128]


def test_the_tokenizer_no_longer_truncates_at_the_old_length(recipe_values, tiny_checkpoint, tmp_path):
    model = altered(tiny_checkpoint, tmp_path / "model")
    path = Path(model) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": 32}))
    assert resolve(recipe_of({**recipe_values, "model": model})).tokenizer.model_max_length == 128


def test_gradient_checkpointing_is_switched_on(recipe_values, monkeypatch):
    import ropewalk.training.stage as stage

    called = []
    monkeypatch.setattr(stage, "checkpoint_activations", lambda *given: called.append(given))
    recipe_values["evaluation"]["suites"] = []
    extend(recipe_of(recipe_values))
    assert called == []
    recipe_values["stages"][0]["gradient_checkpointing"] = True
    extend(recipe_of({**recipe_values, "output": recipe_values["output"] + "2"}))
    assert len(called) == 1


def test_validation_sources_hold_nothing_out(recipe_values, tiny_documents):
    recipe_values["data"] = {"sources": [str(tiny_documents)], "validation_sources": [str(tiny_documents)]}
    summary = extend(recipe_of(recipe_values))
    manifest = next((Path(summary["output"]) / "data").glob("*/manifest.json"))
    assert json.loads(manifest.read_text())["counts"]["split"]["validation_documents"] == 0


def unfinished(recipe_values) -> Path:
    """The folder of a run whose training was cut off after its second step."""
    from ropewalk.training.checkpoint.single import WholeCheckpoints

    save = WholeCheckpoints.save

    def cut_off(*arguments):
        save(*arguments)
        raise InterruptedError

    WholeCheckpoints.save = cut_off
    try:
        with pytest.raises(InterruptedError):
            extend(recipe_of(recipe_values))
    finally:
        WholeCheckpoints.save = save
    return Path(recipe_values["output"])


def test_a_resumed_run_trains_on_the_rows_it_began_with(recipe_values, tiny_documents, tmp_path, capsys):
    documents = tmp_path / "documents.jsonl"
    documents.write_bytes(tiny_documents.read_bytes())
    recipe_values["data"]["sources"] = [str(documents)]
    extend(recipe_of({**recipe_values, "output": str(tmp_path / "whole")}))
    output = unfinished(recipe_values)
    documents.unlink()
    file = write(tmp_path / "recipe.yaml", recipe_values)
    assert main(["extend", file, "--resume"]) == 0
    assert losses(output) == losses(tmp_path / "whole")
    capsys.readouterr()


def test_a_resumed_run_whose_rows_are_gone_is_refused(recipe_values, tiny_documents, tmp_path, capsys):
    import shutil

    documents = tmp_path / "documents.jsonl"
    documents.write_bytes(tiny_documents.read_bytes())
    recipe_values["data"]["sources"] = [str(documents)]
    output = unfinished(recipe_values)
    shutil.rmtree(output / "data")
    documents.write_text("".join(documents.read_text().splitlines(keepends=True)[:100]))
    file = write(tmp_path / "recipe.yaml", recipe_values)
    assert "the documents have changed" in refused(capsys, "extend", file, "--resume")


def damaged(checkpoint: Path, folder: Path, change) -> str:
    """A copy of a checkpoint whose weights were changed by a function of the named tensors."""
    path = Path(altered(checkpoint, folder)) / "model.safetensors"
    weights = load_file(path)
    save_file(change(weights), path, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: {k: t for k, t in w.items() if "layers.1" not in k}, "lacks the weight model.layers.1"),
        (lambda w: {k: t * float("nan") for k, t in w.items()}, "its weights are damaged"),
        (
            lambda w: {k: t[:-1] if "up_proj" in k else t for k, t in w.items()},
            "wrong shape for the weight model.layers.0.mlp.up_proj.weight and 1 other weight;",
        ),
    ],
)
def test_damaged_weights_are_refused_before_anything_is_written(
    recipe_values, tiny_checkpoint, tmp_path, capsys, change, message
):
    model = damaged(tiny_checkpoint, tmp_path / "damaged", change)
    file = write(tmp_path / "recipe.yaml", {**recipe_values, "model": model})
    assert message in refused(capsys, "extend", file)
    assert not Path(recipe_values["output"]).exists()


def test_truncated_weights_are_refused(recipe_values, tiny_checkpoint, tmp_path, capsys):
    model = altered(tiny_checkpoint, tmp_path / "model")
    path = Path(model) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    file = write(tmp_path / "recipe.yaml", {**recipe_values, "model": model})
    assert "cannot load the model" in refused(capsys, "extend", file)
    path.unlink()
    assert "cannot load the model" in refused(capsys, "extend", file)
    assert not Path(recipe_values["output"]).exists()


@pytest.mark.parametrize(
    ("scaling", "stage", "expected"),
    [
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            {"method": "yarn"},
            8.0,
        ),
        ({"rope_type": "linear", "factor": 4.0}, {"method": "linear", "factor": 8.0}, 8.0),
        (
            {"rope_type": "linear", "factor": 4.0},
            {"method": "linear"},
            r"set stages\.0\.rope\.factor to the total factor",
        ),
    ],
)
def test_a_scaled_checkpoint_whose_config_says_the_original_length(
    recipe_values, tiny_checkpoint, tmp_path, scaling, stage, expected
):
    parameters = {"rope_theta": 1e4, **scaling}
    model = altered(tiny_checkpoint, tmp_path / "scaled", rope_parameters=parameters)
    values = {**recipe_values, "model": model}
    values["stages"] = [{**recipe_values["stages"][0], "context": 256, "rope": stage}]
    if isinstance(expected, str):
        with pytest.raises(RopewalkError, match=expected):
            resolve(recipe_of(values))
    else:
        assert resolve(recipe_of(values)).methods[0].factor == expected


def test_longrope_with_reset_positions_is_refused(recipe_values):
    factors = {"short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 2, 4]}
    recipe_values["stages"][0].update(rope={"method": "longrope", **factors}, positions="reset")
    with pytest.raises(RopewalkError, match="set positions: continuous"):
        resolve(recipe_of(recipe_values))


def test_a_corpus_eaten_by_validation_says_so(recipe_values, tmp_path, capsys):
    recipe_values["data"]["validation_documents"] = 500
    file = write(tmp_path / "recipe.yaml", recipe_values)
    assert "hold out fewer documents for validation (now 120)" in refused(capsys, "extend", file)


def test_frequencies_of_transformers_own_are_not_rounded_with_the_weights(recipe_values, monkeypatch):
    import ropewalk.training.stage as stage

    found, step = [], stage.train_step

    def look(model, *arguments):
        weights = {parameter.dtype for parameter in model.parameters()}
        found.append((weights, model.model.model.rotary_emb.inv_freq.dtype))
        return step(model, *arguments)

    monkeypatch.setattr(stage, "train_step", look)
    recipe_values["evaluation"]["suites"] = []
    recipe_values["stages"][0]["steps"] = 1
    extend(recipe_of({**recipe_values, "exact_rope": False, "precision": "bfloat16"}))
    assert found == [({torch.bfloat16}, torch.float32)]
