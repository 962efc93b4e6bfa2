"""Names to choose from: patterns, positions, engines. Settings are made of them, so nothing here imports torch."""

from __future__ import annotations

from typing import Literal, get_args

Pattern = Literal["full", "intra_document", "anchor"]
"""Which tokens of a packed row see each other; ``PackedLayout`` says exactly which."""

Positions = Literal["continuous", "reset"]
"""RoPE positions of a packed row: counted over the row, or from anew in each document."""

EngineName = Literal["reference", "segments", "flex", "varlen"]
"""What computes attention over packed rows; ``engines.capabilities`` says which can do what."""

PATTERNS: tuple[Pattern, ...] = get_args(Pattern)
POSITIONS: tuple[Positions, ...] = get_args(Positions)
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

Limit = Literal["windows", "dual_chunk_attention"]
"""What a model's config may say of its attention that bounds a context, and that a user may decide to take away."""
