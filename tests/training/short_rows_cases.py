"""Runs with short rows, and what their models compute; spawned processes import it by name."""

from dataclasses import replace
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from ropewalk.data import TrainingRows, open_rows
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.training.documents import noted_rows
from ropewalk.training.preflight import resolve

T, CONTEXT = 32, 128
"""The checkpoint's length, and that of the stage."""
PAIRS = 4
FACTORS = [1.0, 1.5, 2.5, 4.0]
"""Long factors of the checkpoint's rotary pairs."""
LONGROPE = {"method": "longrope", "long_factor": FACTORS}


def with_short_rows(values, rope="yarn", **changed):
    """The recipe of one stage, half of whose rows are short."""
    stage = {
        **values["stages"][0],
        "context": CONTEXT,
        "pattern": "full",
        "rope": rope,
        "short_rows": 0.5,
        "rows_per_step": 4,
        "rows_per_batch": 2,
        **changed,
    }
    return {**values, "stages": [stage]}


def rows_of(output) -> TrainingRows:
    """All rows of a run's first stage."""
    folders = [open_rows(Path(output) / noted_rows(Path(output), short)[0]) for short in (False, True)]
    return TrainingRows(*folders, 0.5)


def one_of_each(output):
    """The long row and the short one of the first step that come first."""
    rows = rows_of(output)
    step = rows.of_step(0, 4, 0)
    return tuple(
        rows.read(next(row for row in step if row.folder is folder)) for folder in (rows.folder, rows.short)
    )


def training_model(recipe, weights, method=None):
    """The model as the stage trains it, in float64, with the weights that a run exported."""
    method = method or resolve(recipe).methods[0]
    model = load_model(recipe.model, ModelSetup(method, CONTEXT), dtype=torch.float64)
    missing, unexpected = model.load_state_dict(load_file(Path(weights) / "model.safetensors"), strict=False)
    # Tied.
    assert set(missing) <= {"lm_head.weight"}
    assert not unexpected
    return model


def in_training(model, rows):
    """Logits of rows of one batch."""
    with torch.no_grad():
        ids = torch.stack([row.input_ids for row in rows])
        return model(input_ids=ids, layout=[row.layout for row in rows], use_cache=False).logits


def plain_model(folder):
    """The exported folder in plain transformers, in float64."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def in_plain_transformers(model, rows):
    """Logits of rows by plain transformers: of each run by itself. Its angles are as wide as float32 is said to be."""
    rotary = model.model.rotary_emb
    # It computes its frequencies when it is made.
    model.model.rotary_emb = type(rotary)(model.config)

    def logits(ids):
        with torch.no_grad():
            return model(ids[None], use_cache=False).logits[0]

    found = []
    for row in rows:
        whole = row.layout.pattern == "full"
        lengths = [row.layout.total_length] if whole else row.layout.cu_seqlens.diff().tolist()
        found.append(torch.cat([logits(part) for part in row.input_ids.split(lengths)]))
    return torch.stack(found)


def without_factor(method):
    return replace(method, attention_factor=1.0)


def long_everywhere(method):
    return replace(method, short_factor=method.long_factor)


def short_everywhere(method):
    return replace(method, long_factor=method.short_factor)
