"""The saved folder in plain transformers against the model in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.models.load import load_model
from ropewalk.parallel import Mesh, World
from ropewalk.verification.case import Case
from ropewalk.verification.checks import Claim, own_mesh
from ropewalk.verification.checks.effective_rope import saved_folder
from ropewalk.verification.computing import experts_for, largest_difference, rounding_budget
from ropewalk.verification.result import Outcome


def saved_equals_ours(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Logits of a plain causal sequence with float64 weights, RoPE angles as each side computes them.

    The budget is twice what transformers' float32 angles change in memory, and the rounding of float32, in which models
    compute their norms.
    """
    from transformers import AutoModelForCausalLM

    folder = saved_folder(case, mesh, world)
    if not world.is_rank_0:
        return Outcome.not_run("")
    ids = case.rows[0].input_ids[None].to(case.device)
    ours, stock = (_logits(case, exact, torch.float64) for exact in (case.setup.exact_rope, False))
    narrow = _logits(case, case.setup.exact_rope, torch.float32)
    saved = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", trust_remote_code=case.setup.trust_remote_code
    )
    saved = saved.to(case.device, torch.float64).eval()
    experts_for(saved, torch.float64)
    with torch.no_grad():
        theirs = {"logits": saved(ids, use_cache=False).logits}
    found = largest_difference(theirs, ours)
    angles = largest_difference(stock, ours).error
    return Outcome.within(
        found.error,
        2 * angles + rounding_budget(narrow, ours, torch.float32),
        f"logits of {ids.shape[1]} tokens; float32 angles alone change them by {angles:.1e}",
        f"plain transformers computes other logits from the saved folder, and float32 angles explain only "
        f"{angles:.1e}: its weights or its config are not those of the model that was saved",
    )


def _logits(case: Case, exact_rope: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Through ropewalk's attention, the whole row one sequence."""
    model: Any = load_model(
        case.model,
        replace(case.setup, engine="segments", exact_rope=exact_rope),
        device=case.device,
    ).to(dtype)
    experts_for(model, dtype)
    layout = PackedLayout.from_lengths([case.length], "full", anchor_length=0)
    with torch.no_grad():
        return {"logits": model(case.rows[0].input_ids[None].to(model.device), layout=layout).logits}


CLAIMS = (
    Claim(
        "saved",
        120,
        "saved folder = model in memory",
        "logits of plain transformers with ours",
        saved_equals_ours,
        own_mesh,
    ),
)
