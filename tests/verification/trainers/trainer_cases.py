"""A transformers Trainer over a tiny random model, correct or with one fault."""

import copy
import json
from pathlib import Path

import torch
from transformers import (
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Trainer,
    TrainingArguments,
)

WIDTHS = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(**changed):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**WIDTHS, rope_parameters={"rope_type": "default", "rope_theta": 5e5}, **changed)
    )


def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**WIDTHS, sliding_window=4))


def make_trainer(folder, model=None, collator=None, kind=Trainer):
    """A Trainer with four micro-batches of two documents a step, which takes its data from the probe."""
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    made = kind(
        model=model or llama(),
        args=arguments,
        data_collator=collator or DataCollatorWithFlattening(),
        train_dataset=[{"input_ids": [3, 4]}],
    )
    made.can_return_loss = True
    return made


class Leaking(DataCollatorWithFlattening):
    """Rows without boundaries: positions run on over all documents."""

    def __call__(self, *args, **kwargs):
        batch = super().__call__(*args, **kwargs)
        batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]
        return batch


class Shifted(DataCollatorWithFlattening):
    """Labels that are already shifted, for a loss that shifts them."""

    def __call__(self, *args, **kwargs):
        batch = super().__call__(*args, **kwargs)
        batch["labels"] = torch.cat([batch["labels"][:, 1:], torch.full((1, 1), -100)], 1)
        return batch


class Crossing(DataCollatorWithFlattening):
    """The first token of a document is a target of the document before it."""

    def __call__(self, *args, **kwargs):
        batch = super().__call__(*args, **kwargs)
        batch["labels"] = batch["input_ids"].clone()
        return batch


class Unwindowed(DataCollatorWithFlattening):
    """Masks of its own, which keep documents apart and forget the windows."""

    def __call__(self, *args, **kwargs):
        batch = super().__call__(*args, **kwargs)
        documents = (batch["position_ids"] == 0).cumsum(-1)[0]
        seen = torch.ones(len(documents), len(documents)).tril().bool() & (documents[:, None] == documents)
        batch["attention_mask"] = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)[
            None, None
        ]
        return batch


class MeanOfMeans(Trainer):
    """Each micro-batch has the same weight, whatever its tokens."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class LosesTheta(Trainer):
    """The saved config has the default base."""

    def save_model(self, folder, *args, **kwargs):
        super().save_model(folder, *args, **kwargs)
        file = Path(folder) / "config.json"
        # Rank 0 alone saves.
        if self.args.should_save:
            file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": None}))


def lost_theta():
    model = llama()
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def bfloat16_inv_freq():
    model = llama()
    model.model.rotary_emb.to(torch.bfloat16)
    return model


FAULTS = {
    "none": {},
    "none, windows": {"model": mistral},
    "leak": {"collator": Leaking},
    "shifted labels": {"collator": Shifted},
    "crossing targets": {"collator": Crossing},
    "mean of means": {"kind": MeanOfMeans},
    "lost theta": {"model": lost_theta},
    "theta lost on save": {"kind": LosesTheta},
    "bfloat16 inv_freq": {"model": bfloat16_inv_freq},
    "wrong window": {"model": mistral, "collator": Unwindowed},
}
"""Arguments of :func:`make_trainer`, not yet made."""


def faulty_trainer(folder, fault):
    chosen = FAULTS[fault]
    made = {key: value if key == "kind" else value() for key, value in chosen.items()}
    return make_trainer(folder, **made)


def mean_of_ranks(documents):
    """A Trainer that divides by the tokens of its own rank alone; the temporary folder is never written to."""
    made = make_trainer("unused")
    made.args.gradient_accumulation_steps = 2
    made.args.average_tokens_across_devices = False
    made.train_dataset = [{"input_ids": each, "labels": each} for each in documents]
    return made
