"""Check that plain transformers computes the same logits from the saved folder as the model in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.models.config.auto_class import plain_model
from ropewalk.models.load import load_model
from ropewalk.parallel import Mesh, World
from ropewalk.verification.case import Case
from ropewalk.verification.checks import Claim, own_mesh
from ropewalk.verification.checks.effective_rope import saved_folder
from ropewalk.verification.computing import exact_in, largest_difference, rounding_budget
from ropewalk.verification.result import Outcome


def saved_equals_ours(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Compare logits of a plain causal sequence with float64 weights; each side computes its own RoPE angles.

    The budget is twice the change that transformers' float32 angles make to the logits of the model in memory, plus the
    rounding of float32, in which models compute their norms.
    """
    folder = saved_folder(case, mesh, world)
    if not world.is_rank_0:
        return Outcome.not_run("")
    ids = case.rows[0].input_ids[None].to(case.device)
    ours, stock = (_logits(case, exact, torch.float64) for exact in (case.setup.exact_rope, False))
    narrow = _logits(case, case.setup.exact_rope, torch.float32)
    # In the dtype of the files, then widened, so that loading itself rounds nothing.
    saved = plain_model(folder, dtype="auto", trust_remote_code=case.setup.trust_remote_code)
    saved = saved.to(case.device, torch.float64).eval()
    exact_in(saved, torch.float64)
    with torch.no_grad():
        theirs = {"logits": saved(ids, use_cache=False).logits}
    found = largest_difference(theirs, ours)
    angles = largest_difference(stock, ours).error
    return Outcome.within(
        found.error,
        # transformers computes angles in float32 whatever the model's dtype, so their effect is measured and
        # allowed for.
        2 * angles + rounding_budget(narrow, ours, torch.float32),
        f"logits of {ids.shape[1]} tokens; float32 angles alone change them by {angles:.1e}",
        f"plain transformers computes different logits from the saved folder, and float32 angles explain only "
        f"{angles:.1e}: the folder's weights or config are not those of the model that was saved",
    )


def _logits(case: Case, exact_rope: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits with ropewalk's attention, treating the whole row as one sequence."""
    model: Any = load_model(
        case.model,
        replace(case.setup, engine="sdpa", exact_rope=exact_rope),
        device=case.device,
    ).to(dtype)
    exact_in(model, dtype)
    # One document without an anchor is what plain transformers computes, so the two are comparable.
    layout = PackedLayout.from_lengths([case.length], "full", anchor_length=0)
    with torch.no_grad():
        return {"logits": model(case.rows[0].input_ids[None].to(model.device), layout=layout).logits}


CLAIMS = (
    Claim(
        "saved",
        120,
        "saved folder = model in memory",
        "logits of plain transformers with those of the model in memory",
        saved_equals_ours,
        own_mesh,
    ),
)
