"""Packed rows in transformers' Trainer: every token weighs the same, documents stay apart, checkpoints are plain."""

import copy
import json
import pickle
from contextlib import ExitStack
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from ropewalk import PackedLayout, RopewalkError, Row
from ropewalk.attention.layout import next_token_labels
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.models.load import attach
from ropewalk.training import RowCollator
from ropewalk.verification.settings import TrainerProbeSettings
from ropewalk.verification.trainers.probe import probe_trainer
from tests.longrope_cases import ORIGINAL, TARGET, tiny
from tests.models.attention.two_ropes_cases import LAYOUTS, PAIRS, ROPE, SHORT, ids, the_longest_decides
from tests.models.every_family import tiny_config
from tests.verification.trainers.trainer_cases import llama, make_trainer, mistral

ANCHOR = 1
DOCUMENTS = [list(range(3, 10)), [20, 21], list(range(30, 42)), [50, 51, 52]]


def attached(model=None, **how):
    model = model or llama()
    attach(model, **how)
    return model


def sample(ids, **more):
    return {"input_ids": ids, **more}


def interleaved(first, second):
    """A row in which the second document stands inside the first."""
    layout = PackedLayout.from_segments([4, len(second), len(first) - 4], [0, 1, 0], positions="reset")
    ids = torch.tensor([ANCHOR, *first[:4], *second, *first[4:]])
    return Row(ids, next_token_labels(ids, layout), layout)


WHOLE = [sample(each) for each in DOCUMENTS]
ROWS = [interleaved(*DOCUMENTS[:2]), interleaved(*DOCUMENTS[2:])]


class Keeping(Trainer):
    """Keeps the gradients of its one step."""

    def create_optimizer(self, *args, **kwargs):
        made = super().create_optimizer(*args, **kwargs)
        made.register_step_pre_hook(lambda *_: self.keep())
        return made

    def keep(self):
        self.kept = {name: each.grad.clone() for name, each in self.model.named_parameters()}


@pytest.mark.parametrize(("samples", "recompute"), [(WHOLE, False), (WHOLE, True), (ROWS, False)])
def test_gradients_over_micro_batches_are_those_of_the_mean_over_all_tokens(samples, recompute, tmp_path):
    """The oracle runs transformers' own model on each document alone, behind the anchor."""
    model = llama()
    oracle = copy.deepcopy(model)
    total = sum(len(each) - 1 for each in DOCUMENTS)
    for each in DOCUMENTS:
        ids = torch.tensor([[ANCHOR, *each]])
        losses = F.cross_entropy(oracle(ids).logits[0, 1:-1], ids[0, 2:], reduction="sum")
        (losses / total).backward()
    # transformers 5.23 renamed it and warns about the old name.
    names = [each.name for each in fields(TrainingArguments)]
    name = "activation" if "activation_checkpointing" in names else "gradient"
    recomputing = {f"{name}_checkpointing": True} if recompute else {}
    arguments = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=len(samples) // 2,
        gradient_accumulation_steps=2,
        max_steps=1,
        max_grad_norm=0.0,
        **recomputing,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = Keeping(
        model=attached(model),
        args=arguments,
        data_collator=RowCollator(anchor=[ANCHOR], positions="reset"),
        train_dataset=samples,
    )
    trainer.train()
    for name, each in oracle.named_parameters():
        torch.testing.assert_close(trainer.kept[name], each.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("pattern", ["anchor", "intra_document"])
@pytest.mark.parametrize("family", [llama, mistral])
def test_the_probe_finds_nothing(family, pattern, tmp_path):
    collator = RowCollator(anchor=[ANCHOR], pattern=pattern)
    result = probe_trainer(
        TrainerProbeSettings(target="here", tokens=2),
        function=lambda: make_trainer(tmp_path, attached(family()), collator),
    )
    assert all(check.passed for check in result.checks), result


def test_the_probe_finds_rows_that_are_one_document(tmp_path):
    result = probe_trainer(
        TrainerProbeSettings(target="here", tokens=2),
        function=lambda: make_trainer(tmp_path, attached(), RowCollator(anchor=[ANCHOR], pattern="full")),
    )
    assert result.failed == ["documents apart"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_model_that_reads_no_layout_fails_instead_of_leaking(attention):
    model = llama()
    model.set_attn_implementation(attention)
    with pytest.raises(RuntimeError, match="must match"):
        model(**RowCollator(anchor=[ANCHOR])(WHOLE))


@pytest.mark.parametrize("number", [1, 2])
def test_packed_rows_under_a_mask_that_hides_nothing_are_refused(number):
    """Such as axolotl's collators make, in which a mask of ones hides that positions restart."""
    ids, positions = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[0, 1, 0, 1]])
    mask = torch.tensor([[1, 1, number, number]])
    with pytest.raises(RopewalkError, match="position_ids restart"):
        attached()(ids, position_ids=positions, attention_mask=mask)
    padded = torch.tensor([[0, 0, 1, 1]])
    assert attached()(ids, position_ids=positions, attention_mask=padded).logits.isfinite().all()


@pytest.mark.parametrize(
    "options",
    [
        {"dataloader_num_workers": 1},
        {"train_sampling_strategy": "group_by_length"},
        {"accelerator_config": {"split_batches": True}},
        {"neftune_noise_alpha": 5.0},
        {"auto_find_batch_size": True},
        {"bf16": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_trainer_change_nothing_in_a_step(options, tmp_path):
    def make(documents):
        arguments = TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            use_cpu=True,
            report_to=[],
            **options,
        )
        samples = [sample(each) for each in documents]
        return Trainer(
            model=attached(), args=arguments, data_collator=RowCollator([ANCHOR]), train_dataset=samples
        )

    assert probe_trainer(TrainerProbeSettings(target="here", tokens=2), function=make).failed == []


def test_the_probe_does_not_judge_smoothed_labels(tmp_path):
    def make():
        made = make_trainer(tmp_path, attached(), RowCollator(anchor=[ANCHOR]))
        made.label_smoother = LabelSmoother(0.1)
        return made

    checks = probe_trainer(TrainerProbeSettings(target="here", tokens=2), function=make).checks
    by_name = {check.name: check for check in checks}
    assert by_name["documents apart"].passed
    assert by_name["token mean"].passed is None
    assert "label smoothing" in by_name["token mean"].note


@pytest.mark.parametrize(("weighted", "failed"), [(True, []), (False, ["token mean"])])
def test_accelerate_accumulates_a_mean_over_all_tokens(weighted, failed):
    """As on the page; without the count of targets, the probe finds a mean of means."""

    def make(documents):
        accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
        made = attached()
        samples = [sample(each) for each in documents]
        loader = torch.utils.data.DataLoader(samples, batch_size=2, collate_fn=RowCollator([ANCHOR]))
        model, optimizer, loader = accelerator.prepare(
            made, torch.optim.SGD(made.parameters(), lr=0.0), loader
        )

        def step():
            batches = list(loader)
            targets = accelerator.reduce(sum((each["labels"] != -100).sum() for each in batches), "sum")
            for batch in batches:
                with accelerator.accumulate(model):
                    count, factor = (targets, len(batches)) if weighted else (None, 1)
                    loss = model(**batch, num_items_in_batch=count).loss
                    accelerator.backward(loss * factor * accelerator.num_processes)
                    optimizer.step()
                    optimizer.zero_grad()

        return made, step

    assert probe_trainer(TrainerProbeSettings(target="here", tokens=2), function=make).failed == failed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_probe_finds_nothing_in_an_sft_trainer(tmp_path):
    import trl  # seconds, so for this test alone

    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.pad_token = tokenizer.eos_token

    def make(documents):
        arguments = trl.SFTConfig(
            str(tmp_path),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=4,
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to=[],
        )
        return trl.SFTTrainer(
            model=attached(),
            args=arguments,
            data_collator=RowCollator(anchor=[ANCHOR]),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"input_ids": documents}),
        )

    assert probe_trainer(TrainerProbeSettings(target="here", tokens=2), function=make).failed == []


YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("family", ["llama", "mllama"])
def test_a_checkpoint_is_plain(family, tmp_path):
    """Of Llama 3.2 with images, AutoModelForCausalLM loads the language model, and not from that model's own config."""
    torch.manual_seed(0)
    config = tiny_config(family)
    config.get_text_config().rope_parameters = dict(YARN)
    stock = AutoModelForCausalLM.from_config(config)
    trained = copy.deepcopy(stock)
    attach(trained)
    trainer = make_trainer(tmp_path / "run", trained, RowCollator(anchor=[ANCHOR]))
    # A copy saves itself and not the model that it was copied from.
    trainer.model = pickle.loads(pickle.dumps(copy.deepcopy(trainer.model)))
    del trained
    trainer.save_model(str(tmp_path / "saved"))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(plain) is type(stock)
    assert plain.config.get_text_config().rope_parameters.items() >= YARN.items()
    assert plain.state_dict().keys() == stock.state_dict().keys()
    ids = torch.arange(3, 40)[None]
    assert torch.equal(plain(ids).logits, stock.eval()(ids).logits)


def test_a_checkpoint_has_the_spelling_of_older_readers(tmp_path):
    made = attached(llama())
    make_trainer(tmp_path / "run", made, RowCollator(anchor=[ANCHOR])).save_model(str(tmp_path / "saved"))
    stated = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert stated["rope_theta"] == stated["rope_parameters"]["rope_theta"] == 5e5
    with pytest.raises(RopewalkError, match="call push_to_hub"):
        made.save_pretrained(tmp_path / "pushed", push_to_hub=True)


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(tmp_path):
    def train(folder, **more):
        arguments = TrainingArguments(
            str(folder),
            per_device_train_batch_size=1,
            max_steps=3,
            save_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        collator = RowCollator(anchor=[ANCHOR])
        trainer = Trainer(model=attached(), args=arguments, data_collator=collator, train_dataset=WHOLE)
        trainer.train(**more)
        return trainer.model.state_dict()

    whole = train(tmp_path / "whole")
    resumed = train(tmp_path / "again", resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert all(torch.equal(resumed[name], each) for name, each in whole.items())
    assert not all(torch.equal(each, whole[name]) for name, each in llama().state_dict().items())


def test_labels_of_interleaved_rows_and_masked_tokens_survive_the_shift_of_the_loss():
    layout = PackedLayout.from_segments([2, 3, 2], [0, 1, 0])
    ids = torch.arange(10, 18)
    labels = next_token_labels(ids, layout)
    batch = RowCollator()([Row(ids, labels, layout)] * 2)
    assert torch.equal(batch["labels"][:, 1:], labels[:-1].expand(2, -1))
    assert labels[-1] == batch["labels"][0, 0] == -100
    assert batch["layout"] == (layout, layout)
    assert batch["position_ids"].tolist() == [list(range(8))] * 2
    masked = RowCollator(anchor=[1])([sample([3, 4, 5], labels=[-100, -100, 5]), sample([6, 7])])
    assert masked["input_ids"].tolist() == [[1, 3, 4, 5, 6, 7]]
    assert masked["labels"].tolist() == [[-100, -100, -100, 5, -100, 7]]


@pytest.mark.parametrize("name", ["completion_mask", "assistant_masks"])
def test_tokens_that_trl_masks_are_no_targets(name):
    batch = RowCollator(anchor=[1])([sample([3, 4, 5, 6], **{name: [0, 0, 1, 1]}, labels=[3, 4, 5, -100])])
    assert batch["labels"].tolist() == [[-100, -100, -100, 5, -100]]


@pytest.mark.parametrize(
    ("collator", "samples", "words"),
    [
        (RowCollator(), [sample([3, 4])], "pattern='anchor' needs the ids of the anchor's tokens"),
        (RowCollator([1]), [sample([3, 4], attention_mask=[1, 0])], "padded"),
        (RowCollator([1]), [sample([3, 4], labels=[4, 5])], "not shifted"),
        (RowCollator([1]), [sample([3, 4, 5], seq_lengths=[2, 1])], "set packing=False"),
        (RowCollator([1]), [sample([3]), Row(*[torch.ones(2)] * 2, None)], "packed rows and documents"),
        (RowCollator(), [Row(*[torch.ones(n)] * 2, None) for n in (2, 3)], "got lengths from 2 to 3 tokens"),
    ],
)
def test_what_a_row_cannot_hold_is_refused(collator, samples, words):
    with pytest.raises(RopewalkError, match=words):
        collator(samples)


def test_rows_of_two_kinds_in_one_batch_have_the_rope_of_their_own_lengths():
    """A short row of one folder and a long one of another, as Trainer takes them from a concatenated data set."""
    entry = {"rope_type": "longrope", **ROPE.to_entry(), "factor": TARGET / ORIGINAL}
    model = attached(tiny(head_dim=2 * PAIRS, rope_parameters=entry, max_position_embeddings=TARGET).double())
    rows = [
        Row(each, next_token_labels(each, layout), layout)
        for each, layout in zip(ids(), LAYOUTS, strict=True)
    ]
    with torch.no_grad():
        together = model(**RowCollator()(rows)).logits
        alone = torch.cat([model(**RowCollator()([row])).logits for row in rows])
        with ExitStack() as stack:
            the_longest_decides(stack)
            wrong = model(**RowCollator()(rows)).logits
    # Sums of some dozen terms in another order, in float64.
    assert float((together - alone).abs().max()) <= 1e-12 * float(alone.abs().max())
    assert float((wrong - alone)[list(SHORT)].abs().max()) > 1e-3 * float(alone.abs().max())
