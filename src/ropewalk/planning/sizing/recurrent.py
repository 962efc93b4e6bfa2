"""Operations of recurrent layers, and sizes of what ranks pass on for them.

Kernels compute a recurrence in chunks: within a chunk by products of all pairs of tokens, and from chunk to chunk by
products with the state. A multiply-add counts as two operations. Triangular products are counted whole, as kernels
compute them; sums, decays and inverses of triangular matrices are left out. All formulas are for the forward. The
backward has two products for each of these, and what it computes again besides.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ropewalk.attention.speeds import Generation, Speed
from ropewalk.models.attention.recurrent import mixers_of
from ropewalk.models.config.layers import GATED_DELTA, KIMI_DELTA, LIGHTNING, MAMBA_2
from ropewalk.models.config.model import ModelConfig

DELTA_CHUNK = 64
"""Tokens of a chunk of gated DeltaNet and Kimi's delta rule, in transformers' code and in flash-linear-attention."""

_FITTED = "fitted to times of fla 0.5.1 with 32 heads, QwenLM/FlashQLA, 2026,"
_AS_H200 = "a guess: as many FLOP/s as on an H200"
_GUESS = "a guess"
SHARES: dict[Generation, Speed] = {
    "ampere": Speed(0.2, _GUESS),
    "ada": Speed(0.2, _GUESS),
    "hopper": Speed(0.1, f"{_FITTED} benchmark_results_H200.txt"),
    "blackwell": Speed(0.045, f"{_FITTED} benchmark_results_GB200.txt"),
    "rtx_blackwell": Speed(0.2, _GUESS),
    "cdna3": Speed(0.075, _AS_H200),
}
"""Share of the peak in dense bfloat16 products that kernels of recurrent layers reach if memory does not limit them.

The published times are of gated DeltaNet, forward and backward, for 2K to 32K tokens and 32 heads: planned at 0.95 to
1.06 of them. With 64 heads, kernels are 1.2 times as fast, and with 8 heads half as fast, because the heads of a row
are all that they can compute at the same time. Other recurrences were not measured.
"""


def delta_rule_flops(tokens: int, heads: int, key_dim: int, value_dim: int, chunk: int = DELTA_CHUNK) -> int:
    """Operations of a gated delta rule or of Kimi's.

    In a chunk of C tokens: keys with keys, queries with keys, an inverse with keys and with values, and scores with
    values, ``C·C·K`` or ``C·C·V`` each; keys with the state, queries with the state, and keys with values, ``C·K·V``
    each.

    Args:
        tokens: number of tokens.
        heads: value heads.
        key_dim, value_dim: dimensions of a head, K and V.
        chunk: tokens of a chunk, C.

    Source: Gated DeltaNet, arXiv:2412.06464, section 3.3; Kimi Linear, arXiv:2510.26692, section 3.
    """
    return 2 * tokens * heads * (chunk * (3 * key_dim + 2 * value_dim) + 3 * key_dim * value_dim)


def scan_flops(tokens: int, heads: int, head_dim: int, state: int, groups: int, chunk: int) -> int:
    """Operations of Mamba-2.

    In a chunk of C tokens: B with C for each group, ``C·C·N``; scores with inputs, ``C·C·P`` for each head; inputs with
    B, and C with the state, ``C·N·P`` each.

    Args:
        tokens: number of tokens.
        heads: number of heads.
        head_dim: dimensions of a head, P.
        state: state per dimension of a head, N.
        groups: groups of heads that share B and C.
        chunk: tokens of a chunk, C.

    Source: Mamba-2, arXiv:2405.21060, section 6.
    """
    return 2 * tokens * (chunk * (groups * state + heads * head_dim) + 2 * heads * state * head_dim)


def lightning_flops(tokens: int, heads: int, head_dim: int, block: int) -> int:
    """Operations of lightning attention.

    In a block of C tokens: queries with keys and scores with values, ``C·C·D`` each; queries with the state and keys
    with values, ``C·D·D`` each.

    Source: lightning attention, arXiv:2401.04658, algorithm 1.
    """
    return 4 * tokens * heads * head_dim * (block + head_dim)


def convolution_flops(tokens: int, channels: int, width: int) -> int:
    """Operations of a causal convolution of each channel by itself with ``width`` numbers."""
    return 2 * tokens * channels * width


@dataclass(frozen=True)
class RecurrentShape:
    """Dimensions of a recurrent mixer.

    Attributes:
        recurrence: its recurrence; a short convolution has no state.
        heads: heads of the state.
        key_dim, value_dim: dimensions of a head's state. Mamba-2 has B and C for keys and queries, and its inputs for
            values.
        groups: groups of heads that share B and C in Mamba-2.
        chunk: tokens of a chunk.
        channels, width: those of the convolution; 0 for none.
    """

    recurrence: str
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    groups: int = 0
    chunk: int = 0
    channels: int = 0
    width: int = 0

    @classmethod
    def of(cls, mixer: Any, recurrence: str) -> RecurrentShape:
        """Read a mixer of transformers."""
        convolution = getattr(mixer, "conv1d", getattr(mixer, "conv", None))
        ends = (0, 0) if convolution is None else (convolution.in_channels, convolution.kernel_size[0])
        if recurrence == GATED_DELTA:
            dims = (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim, 0, DELTA_CHUNK)
        elif recurrence == KIMI_DELTA:
            dims = (mixer.num_heads, mixer.head_dim, mixer.head_dim, 0, DELTA_CHUNK)
        elif recurrence == MAMBA_2:
            dims = (mixer.num_heads, mixer.ssm_state_size, mixer.head_dim, mixer.n_groups, mixer.chunk_size)
        elif recurrence == LIGHTNING:
            dims = (mixer.num_attention_heads, mixer.head_dim, mixer.head_dim, 0, mixer.block_size)
        else:
            dims = (0,) * 5
        return cls(recurrence, *dims, *ends)

    def flops(self, tokens: int) -> int:
        """Operations of the recurrence and of the convolution, in the forward."""
        return convolution_flops(tokens, self.channels, self.width) + self._of_state(tokens)

    def _of_state(self, tokens: int) -> int:
        if self.recurrence == MAMBA_2:
            return scan_flops(tokens, self.heads, self.value_dim, self.key_dim, self.groups, self.chunk)
        if self.recurrence == LIGHTNING:
            return lightning_flops(tokens, self.heads, self.key_dim, self.chunk)
        return delta_rule_flops(tokens, self.heads, self.key_dim, self.value_dim, self.chunk)

    @property
    def summary(self) -> int:
        """Numbers in what a rank passes on of a fragment of a row; see :mod:`ropewalk.models.attention.passed_states`.

        They are the state behind it, and the factors of the state before: a matrix for each head of a delta rule, and a
        number otherwise.
        """
        factors = self.key_dim**2 if self.recurrence in (GATED_DELTA, KIMI_DELTA) else 1
        return self.heads * (self.key_dim * self.value_dim + factors)


def recurrent_shapes(model: nn.Module, config: ModelConfig) -> tuple[RecurrentShape, ...]:
    """The mixers of a model's recurrent layers, first to last.

    Args:
        model: a transformers model.
        config: its config.
    """
    mixers = mixers_of(model, config)
    assert not mixers or config.mixer is not None
    return tuple(RecurrentShape.of(each, config.mixer.recurrence) for each in mixers if config.mixer)
