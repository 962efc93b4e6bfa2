"""Export of an adapter: its own folder, which plain peft loads, and the model with the adapter merged into it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ropewalk.io.files import new_folder, write_text
from ropewalk.models.adapter import adapter_of, merge_adapter, save_adapter, trained_parameters
from ropewalk.models.compute.losses import LossModel
from ropewalk.models.config.auto_class import auto_class
from ropewalk.parallel import World
from ropewalk.training.checkpoint.files import Position, write_export_record
from ropewalk.training.checkpoint.sharded import export_model

README = """\
---
library_name: peft
base_model: {base}
---

# Adapter for {context:,} tokens

`config.json` in this folder is the base model's with the RoPE that the adapter was trained with. Load the base with it;
without it the base has its own RoPE, and the adapter does not fit.

```python
from peft import PeftModel
from transformers import AutoConfig, {loads}

config = AutoConfig.from_pretrained({folder})
base = {loads}.from_pretrained({base}, config=config)
model = PeftModel.from_pretrained(base, {folder})
```

Digest of the base model's config and weights (SHA-256): {digest}
"""


def export_adapter(
    trained: LossModel,
    adapter: Path,
    merged: Path,
    tokenizer: Any,
    dtype: torch.dtype,
    context: int,
    digest: str | None,
    position: Position,
    weights: Mapping[str, Any] | None = None,
) -> None:
    """Write an adapter's folder, merge the adapter into the model in place, and export the model.

    Args:
        trained: whole model in float32 with an adapter, in this process alone.
        adapter: folder for the adapter, to create or replace.
        merged: folder for the model, to create or replace.
        tokenizer: tokenizer to save with the model.
        dtype: dtype of the base model's weights, and of the exported ones.
        context: longest input in tokens.
        digest: digest of the base model; None if it is unknown.
        position: progress of the run that the adapter comes from.
        weights: the checkpoint that is exported, for the record; None for the last one.
    """
    model = trained.model
    there = adapter_of(model)
    assert there is not None
    base = str(there.config.base_model_name_or_path)
    with new_folder(adapter) as partial:
        save_adapter(model, partial, trained_parameters(model), dtype)
        # A JSON string is also valid YAML for the header and valid Python for the example.
        quoted = {"base": json.dumps(base), "folder": json.dumps(str(adapter))}
        write_text(
            partial / "README.md",
            README.format(
                context=context, digest=digest or "unknown", loads=auto_class(model.config).__name__, **quoted
            ),
        )
        write_export_record(partial, position, weights)
    # After the adapter is written: merging adds its matrices to the weights and cannot be undone.
    merge_adapter(model)
    export_model(trained, merged, tokenizer, World(), dtype, position, weights)
