"""The script that trains the embedded retrieval model."""

import importlib
import random
import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropewalk.data.read.retrieval import ExamWriter
from ropewalk.evaluation.prompt import PromptEncoder
from tests.places import ROOT

WORDS = (("bright", "calm", "late", "swift"), ("river", "stone", "cloud", "lamp", "harbour"))
CORPUS = ["def f(x):\n    return x + 1\n" * 20, "The lambda expression yields a function object.\n" * 30]


@pytest.fixture(scope="module")
def script():
    """The script as a module; it imports its rows from the folder that it lies in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("train_retrieval_model")
        for name in ("train_retrieval_model", "retrieval_rows"):
            patch.delitem(sys.modules, name)


@pytest.fixture(scope="module")
def tokenizer(script):
    return script.train_tokenizer(CORPUS, (WORDS[0] * 3, WORDS[1] * 3), seed=3)


@pytest.fixture
def maker(script, tokenizer):
    return script.RowMaker(tokenizer, WORDS, CORPUS, seed=7)


def runs_of(flags):
    """Half-open ranges of consecutive true values."""
    starts = [n for n, each in enumerate(flags) if each and (n == 0 or not flags[n - 1])]
    ends = [n + 1 for n, each in enumerate(flags) if each and (n + 1 == len(flags) or not flags[n + 1])]
    return list(zip(starts, ends, strict=True))


@pytest.mark.parametrize("stage", range(3))
def test_rows_fit_their_stage(script, maker, stage):
    for each in [script.STAGES[stage], *script.LAST_STAGES]:
        for _ in range(20):
            ids, weights = maker.row(each)
            assert len(ids) == len(weights) <= each.length
            assert any(weights)


def test_answers_are_tokenised_as_a_model_goes_on_from_the_prompt(tokenizer, maker):
    writer = ExamWriter(random.Random(5), WORDS)
    for exam in [writer.passkey(4), writer.needles(3, 1, 1), writer.chain(5, 2)]:
        ids, weights = maker.exam_ids(exam)
        ((question, answer),) = exam.questions
        prompt = list(PromptEncoder(tokenizer).encode(exam.context + question).input_ids)
        assert ids[: len(prompt)] == prompt
        assert tokenizer.decode(ids[len(prompt) : -1]) == answer
        assert all(weight >= 1 for weight in weights[len(prompt) :])
        assert max(weights[: len(prompt)]) < 1


def test_every_name_of_a_chain_row_has_a_heavy_first_letter(script, tokenizer, maker):
    ids, weights = maker.chains(256)
    heavy = [tokenizer.decode([id]) for id, weight in zip(ids, weights, strict=True) if weight > 1]
    assert len(heavy) == 10
    assert all(letter[0] == " " and letter[1:].isupper() for letter in heavy)
    assert tokenizer.decode(ids).count("Answer:") == 2


def test_recalled_digits_follow_their_key_earlier(tokenizer, maker):
    digits = {tokenizer.convert_tokens_to_ids(str(n)) for n in range(10)}
    for _ in range(40):
        ids, weights = maker.recall(128)
        spans = runs_of([weight > 0 for weight in weights])
        assert {ids[n] for start, end in spans for n in range(start, end)} <= digits
        stored = ids[: spans[0][0]]
        for start, end in spans:
            value = ids[start:end]
            assert any(stored[n : n + len(value)] == value for n in range(len(stored)))


def test_same_seed_gives_the_same_rows(script, tokenizer):
    def rows(seed):
        maker = script.RowMaker(tokenizer, WORDS, CORPUS, seed)
        return [maker.row(stage) for stage in (*script.STAGES, *script.LAST_STAGES) for _ in range(5)]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_phrases_digits_and_capitals_are_single_tokens(script, tokenizer):
    for phrase in script.PHRASES:
        assert len(tokenizer.encode(phrase, add_special_tokens=False)) == 1
    pieces = [tokenizer.decode([id]) for id in tokenizer.encode(" ABC 123", add_special_tokens=False)]
    assert pieces == [" A", "B", "C", " 1", "2", "3"]


@pytest.mark.parametrize("text", ["Żółć ≠ 🦆\t\n", "The pass key is 12, VAR X = VAR Y \n"])
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_first_layers_heads_begin_by_looking_back(script, tokenizer):
    torch.manual_seed(0)
    model = script.build_model(len(tokenizer))
    model.set_attn_implementation("eager")
    ids = torch.randint(2, len(tokenizer), (4, 100))
    with torch.no_grad():
        attention = model(input_ids=ids, output_attentions=True).attentions[0]
    for head, distance in enumerate(script.LOOK_BACK):
        by_distance = [attention[:, head].diagonal(-back, 1, 2)[:, 12 - back :].mean() for back in range(12)]
        assert torch.stack(by_distance).argmax() == distance


def test_second_layers_heads_begin_by_looking_where_the_same_tokens_came_before(script, tokenizer):
    torch.manual_seed(0)
    model = script.build_model(len(tokenizer))
    model.set_attn_implementation("eager")
    half = torch.stack([torch.randperm(len(tokenizer) - 2)[:40] + 2 for _ in range(8)])
    with torch.no_grad():
        attention = model(input_ids=torch.cat([half, half], 1), output_attentions=True).attentions[1]
    # Head 0 knows the token before a query, which also stands two before the key that comes one place later.
    at = torch.arange(45, 79)
    followed = attention[:, 0, at, at - 40 + 1].mean()
    others = attention[:, 0, 45:79, 5:35].mean()
    assert followed > 3 * others


def test_loss_is_the_mean_over_weighted_tokens(script, tokenizer, maker):
    torch.manual_seed(0)
    model = script.build_model(len(tokenizer))
    rows = [maker.exams(200), maker.recall(64)]
    loss, _ = script.weighted_loss(model, *script.batch_of(rows))
    total = weighted = 0.0
    with torch.no_grad():
        for ids, weights in rows:
            logits = model(input_ids=torch.tensor([ids])).logits[0]
            each = F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
            total += (each * torch.tensor(weights[1:])).sum().item()
            weighted += sum(weights[1:])
    assert loss.item() == pytest.approx(total / weighted, rel=1e-5)


def test_stages_follow_each_other_to_the_context(script):
    found = [script.stage_at(script.STAGES, n / 1000) for n in range(1001)]
    assert [stage for n, stage in enumerate(found) if n == 0 or stage != found[n - 1]] == list(script.STAGES)
    assert found[-1].length == script.CONTEXT == script.LAST_STAGES[-1].length


def test_learning_rate_rises_stays_and_falls(script):
    assert script.rate_share(0, 0.0) == pytest.approx(1 / script.WARMUP_STEPS)
    assert script.rate_share(10_000, 0.5) == 1
    assert script.rate_share(10_000, 0.75) == pytest.approx(0.5 + script.FINAL_RATE_SHARE)


@pytest.mark.slow  # the tokenizer of the whole corpus
def test_short_run_writes_a_folder_that_transformers_loads(script, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(script, "BATCH_TOKENS", 512)
    script.main(["--output", str(tmp_path / "model"), "--steps", "4"])
    assert "4 steps" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model", local_files_only=True)
    assert len(tokenizer) == model.config.vocab_size
    assert model.config.max_position_embeddings == script.CONTEXT
    assert sum(path.stat().st_size for path in (tmp_path / "model").iterdir()) < 5_000_000


def test_unusable_arguments_are_refused(script, tmp_path, capsys):
    with pytest.raises(SystemExit):
        script.main(["--output", str(tmp_path / "model"), "--steps", "0"])
    assert "--steps 0 must be positive" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.main(["--output", str(tmp_path)])
    assert "exists already" in capsys.readouterr().err
