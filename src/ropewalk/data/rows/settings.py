"""PackingSettings: how documents become rows; every policy has a name, and none is implied."""

from __future__ import annotations

import string
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ropewalk.attention.layout import PATTERNS, POSITIONS, Pattern, Positions
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError

Bos = Literal["auto", "document", "row", "none"]
LongDocuments = Literal["split", "truncate", "skip"]
Packing = Literal["sequential", "best_fit"]
Remainder = Literal["drop", "pad"]
BOS_POLICIES: tuple[Bos, ...] = get_args(Bos)
LONG_DOCUMENTS: tuple[LongDocuments, ...] = get_args(LongDocuments)
PACKINGS: tuple[Packing, ...] = get_args(Packing)
REMAINDERS: tuple[Remainder, ...] = get_args(Remainder)


@dataclass(frozen=True)
class InterleaveSettings:
    """Interleaved chunks: documents of a row are cut, and the parts of all documents shuffled.

    The order inside a document stays, and visibility follows the document. Defaults are the settings of
    AnchorContext (arXiv:2411.13476).

    Attributes:
        min_length, max_length: tokens of a document, as it lies in the row, from and up to which it is cut;
            shorter and longer ones stay whole, but are shuffled like the parts.
        parts: into how many parts; one of these, each as likely.
        cut_points: a cut lies between these shares of the document's length.
        seed: of the cuts and the shuffle; with the row's number it decides both.

    Raises:
        RopewalkError: if a value is out of range.
    """

    min_length: int = 64
    max_length: int = 2048
    parts: tuple[int, ...] = (2, 3)
    cut_points: tuple[float, float] = (0.2, 0.8)
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "cut_points", tuple(self.cut_points))
        if not 1 <= self.min_length <= self.max_length:
            raise RopewalkError(
                f"interleaved documents need 1 <= min_length <= max_length, got {self.min_length} and {self.max_length}"
            )
        if not self.parts or min(self.parts) < 2:
            raise RopewalkError(f"interleaved documents are cut into 2 parts or more, got {list(self.parts)}")
        if len(self.cut_points) != 2 or not 0 <= self.cut_points[0] < self.cut_points[1] <= 1:
            raise RopewalkError(
                f"cut points must be two shares from 0 to 1, the smaller first, got {list(self.cut_points)}"
            )
        if self.seed < 0:
            raise RopewalkError(f"the seed of interleaving must be 0 or more, got {self.seed}")


@dataclass(frozen=True)
class PackingSettings:
    """How documents become rows.

    Attributes:
        context: tokens of a row, at least 2.
        pattern: which token may see which, as in PackedLayout. ``anchor`` puts one anchor token at index 0.
        positions: RoPE positions, ``continuous`` over the row or ``reset`` in each document. The continuation
            of a cut document counts as a document of its row, and restarts as well.
        bos: where a BOS token goes. ``document``: first in every document, not in a continuation. ``row``:
            first in every row, nowhere else. ``none``: nowhere. ``auto``: ``row`` under the pattern
            ``anchor`` (the BOS is the anchor), else ``document`` where the tokenizer has a BOS token and
            ``none`` where it has none. The pattern ``anchor`` takes no other policy than ``row``.
        eos: whether an EOS token ends every document.
        long_documents: a document that is longer than a row is ``split`` over several rows, ``truncate``d to
            one row's length, or left out (``skip``).
        tag: text before each document, seen by it and never a target; ``{source}`` stands for its source's
            name. It comes after a document's BOS; a continuation has none. None puts none.
        packing: ``sequential`` fills rows in the order that documents come, and cuts them at a row's end;
            ``best_fit`` cuts only documents longer than a row, and pads what stays free (arXiv:2404.10830).
        remainder: the tokens of the last row that is not full (under ``best_fit`` of the emptiest row) are left out
            (``drop``), or the row is filled up with padding that is never a target (``pad``).
        interleave: cut documents and shuffle the parts within each row; None leaves them whole.

    Raises:
        RopewalkError: if a value is unknown or two contradict each other.
    """

    context: int
    pattern: Pattern = "anchor"
    positions: Positions = "continuous"
    bos: Bos = "auto"
    eos: bool = True
    long_documents: LongDocuments = "split"
    tag: str | None = None
    packing: Packing = "sequential"
    remainder: Remainder = "drop"
    interleave: InterleaveSettings | None = None

    def __post_init__(self) -> None:
        if self.context < 2:
            raise RopewalkError(f"context must be 2 tokens or more, got {self.context}")
        for name, value, accepted in (
            ("pattern", self.pattern, PATTERNS),
            ("positions", self.positions, POSITIONS),
            ("bos", self.bos, BOS_POLICIES),
            ("long_documents", self.long_documents, LONG_DOCUMENTS),
            ("packing", self.packing, PACKINGS),
            ("remainder", self.remainder, REMAINDERS),
        ):
            if value not in accepted:
                raise RopewalkError(f"unknown {name} {value!r}; choose one of {', '.join(accepted)}")
        if self.pattern == "anchor" and self.bos not in ("auto", "row"):
            raise RopewalkError(
                "pattern anchor begins each row with the anchor and has no other BOS; bos must be auto or row"
                f", got {self.bos}"
            )
        if self.interleave is not None and self.bos == "row" and self.pattern != "anchor":
            raise RopewalkError(
                f"bos row begins the first document of a row, and interleaving would move it; choose bos document or "
                f"none for the pattern {self.pattern}"
            )
        if self.tag is not None:
            check_tag(self.tag)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PackingSettings:
        """The settings that ``dataclasses.asdict`` made ``values`` of."""
        interleave = values.get("interleave")
        return cls(
            **{**values, "interleave": None if interleave is None else InterleaveSettings(**interleave)}
        )

    @property
    def anchor_length(self) -> int:
        """Tokens that stand before the first document of a row."""
        return 1 if self.pattern == "anchor" else 0

    def bos_policy(self, special: SpecialTokens) -> Literal["document", "row", "none"]:
        """The policy that ``auto`` stands for with this tokenizer.

        Raises:
            RopewalkError: if the settings ask for a BOS or EOS token that the tokenizer lacks.
        """
        if self.eos and special.eos is None:
            raise RopewalkError("the tokenizer has no EOS token to end documents with; choose eos false")
        if self.bos == "auto":
            if self.pattern == "anchor":
                return "row"
            return "none" if special.bos is None else "document"
        if special.bos is None and (
            self.bos == "document" or (self.bos == "row" and self.pattern != "anchor")
        ):
            raise RopewalkError(
                f"the tokenizer has no BOS token to begin {self.bos}s with; choose bos none"
                + ("" if self.bos == "document" else ", or the pattern anchor, which takes EOS")
            )
        return self.bos

    def room(self, special: SpecialTokens) -> int:
        """Tokens of a row that documents can take: all but a BOS that every row begins with."""
        return self.context - (self.bos_policy(special) == "row")


def check_tag(tag: str) -> None:
    """Refuse a tag that is no template.

    Raises:
        RopewalkError: if it is empty, or names anything but ``{source}``.
    """
    try:
        parts = list(string.Formatter().parse(tag))
    except ValueError as error:
        raise RopewalkError(
            f"the tag {tag!r} is no template: {error}; write {{source}} for the source"
        ) from error
    for _, name, specification, conversion in parts:
        if name is not None and (name != "source" or specification or conversion):
            raise RopewalkError(f"the tag {tag!r} names {{{name}}}, or formats it; only {{source}} is known")
    if not tag:
        raise RopewalkError("the tag is empty; leave it out to put none")
