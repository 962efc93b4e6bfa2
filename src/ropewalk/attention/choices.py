"""Names to choose from: patterns, positions, engines. Settings use them, so this module must not import torch."""

from __future__ import annotations

from typing import Literal, get_args

Pattern = Literal["full", "intra_document", "anchor"]
"""Which tokens of a packed row attend to each other; :class:`PackedLayout` gives the exact rule."""

Positions = Literal["continuous", "reset"]
"""RoPE positions of a packed row: continuous over the row, or restarting in each document."""

EngineName = Literal["reference", "sdpa", "flex", "varlen"]
"""Implementation of attention over packed rows; ``engines.capabilities`` says what each one supports."""

PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
POSITIONS: tuple[Positions, ...] = get_args(Positions)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

Limit = Literal["windows", "dual_chunk_attention"]
"""Limits on the context that a model's config may set in its attention and that a user may choose to remove."""

KEEP_FROM = 8192
"""Mean number of keys of a query from which results are cheaper to move to the host and back than to compute again.

Results that stay on the GPU move nowhere, so those of any number of keys are cheaper to keep.

A result takes 4 bytes a value there and back in 16 bits, and a key 4 operations. At 51 GB/s (PCI Express 5.0, 80 %) and
0.31 to 0.57 of 989 TFLOP/s (FlashAttention 2 and cuDNN on an H200, ``docs/scaling.md``) both take as long at 6,000 to
11,000 keys.
"""
