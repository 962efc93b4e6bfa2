"""verify passes for models whose attention is more than Llama's: windows, chunks, sinks, latent attention, experts."""

import uuid

import pytest
import torch

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.models.attention.recurrent import PACKED_SINCE
from ropewalk.models.config.read import read_config
from ropewalk.models.load import ModelSetup, attention_spec
from ropewalk.rope import Default
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.verification import Case, planned_checks, run_checks
from tests.models.families import tiny_model
from tests.verification.verification_cases import run_with
from tests.versions import needs_transformers

LENGTHS = ([20, 15, 12], [5, 30, 12], [40, 7], [11, 12, 13, 11])
BLIND = ("labels", "shards", "loss", "checkpoint", "resume")
"""Kinds of checks that know nothing of a model's attention; one family, whose layers are of two kinds, has them too."""
FAMILIES = (
    "gpt_oss",
    "llama4",
    "gemma4 with shared keys",
    "deepseek_v3",
    "lfm2",
    "minimax",
)


def case_of(family, folder, scratch):
    """Rows whose documents are longer than the windows of a tiny model, with twice its RoPE base."""
    needs_transformers(PACKED_SINCE.get(family, "0.0"), f"a packed row of {family}")
    tiny_model(family, sharp=True, shallow=True).save_pretrained(folder)
    config = read_config(str(folder))
    generator, rows = torch.Generator().manual_seed(0), []
    for lengths in LENGTHS:
        layout = PackedLayout.from_lengths(lengths, "anchor")
        ids = torch.randint(3, 90, (layout.total_length,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    method = config.full_attention_rope
    return Case(
        model=str(folder),
        setup=ModelSetup(Default(method.rotary_dim, 2 * method.rope_theta), 512),
        rows=tuple(rows),
        trained=(torch.ones(rows[0].layout.total_length, dtype=torch.bool),) * len(rows),
        num_heads=config.num_heads,
        attention=attention_spec(config, "cpu", torch.float32),
        seed=0,
        optimizer=Optimizer(),
        precision="float32",
        rows_per_batch=2,
        gradient_checkpointing=False,
        offload_activations=False,
        keeping=None,
        tiled_mlp=None,
        offload_optimizer=False,
        compiled=False,
        scratch=str(scratch),
        key=uuid.uuid4().hex,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_check_passes_or_says_why_it_was_not_run(two_ranks, tmp_path, family):
    case = case_of(family, tmp_path / "model", tmp_path)
    planned = [each for each in planned_checks(case, 2) if family == "deepseek_v3" or each.kind not in BLIND]
    checks = run_checks(planned, lambda each: two_ranks.run(run_with, None, each, case)[0])
    assert {check.name: check.note for check in checks if check.passed is False} == {}
    not_run = {check.name: check.note for check in checks if check.passed is None}
    assert set(not_run) == {"engine flex = reference", "engine varlen = reference"}
    assert all(not_run.values())
    for check in checks:
        assert check.passed is None or 0 <= check.error <= check.budget
