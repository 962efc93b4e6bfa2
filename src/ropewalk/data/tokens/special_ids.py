"""Which tokens start and end documents in rows, and which is the anchor: the tokenizer's own, or those of settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import near_or_all

if TYPE_CHECKING:
    from ropewalk.data.settings import PackingSettings, RowPolicies

SEPARATORS = ("<|endoftext|>", "<|end_of_text|>")
"""Tokens that end documents in the pretraining of models whose tokenizers name others for chats."""
SHOWN = 12
"""Most tokens that a message lists."""


@dataclass(frozen=True)
class TokenUse:
    """A token that packing adds.

    Attributes:
        use: ``anchor``, ``row start``, ``document start`` or ``document end``.
        token: its text.
        origin: setting or entry of the tokenizer that names it: ``anchor_token``, ``bos_token`` or ``eos_token``.
        chosen: whether a setting names it, and not the tokenizer.
    """

    use: str
    token: str
    origin: str
    chosen: bool

    def __str__(self) -> str:
        return f"{self.use} {self.token} ({'chosen with ' * self.chosen}{self.origin})"


def special_ids(tokenizer: Any, policies: RowPolicies | None = None) -> SpecialTokens:
    """The special tokens of a transformers tokenizer, or those that settings choose among its tokens.

    Args:
        tokenizer: a transformers tokenizer with a fast backend.
        policies: settings of rows, whose ``bos_token``, ``eos_token`` and ``anchor_token`` come before the tokenizer's
            own; None for its own.

    Raises:
        RopewalkError: if a chosen token is no special token of the tokenizer, or there is neither a BOS nor an EOS
            token.
    """
    bos, eos, anchor = (
        None if policies is None or (text := getattr(policies, name)) is None else _id(tokenizer, name, text)
        for name in ("bos_token", "eos_token", "anchor_token")
    )
    bos = tokenizer.bos_token_id if bos is None else bos
    eos = tokenizer.eos_token_id if eos is None else eos
    anchor = next((each for each in (anchor, bos, eos) if each is not None), None)
    if anchor is None:
        raise RopewalkError(
            f"the tokenizer {tokenizer.name_or_path!r} has neither a BOS nor an EOS token to start a row with; "
            "choose one of its tokens with bos_token (--bos-token), or use a tokenizer that has one of them"
        )
    return SpecialTokens(bos, eos, anchor)


def _id(tokenizer: Any, name: str, text: str) -> int:
    # Ordinary tokens are refused: texts contain them, so that they mark nothing.
    known: dict[str, int] = tokenizer.get_added_vocab()
    if text in known:
        return known[text]
    count = len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
    what = "an ordinary token" if count == 1 else f"{count} tokens"
    listed = list(known)
    near = near_or_all(text, listed) if len(listed) <= SHOWN else near_or_all(text, [*listed[:SHOWN], "..."])
    raise RopewalkError(
        f"{name}: {text!r} is {what} of the tokenizer {tokenizer.name_or_path!r}, not one of its special tokens; {near}"
    )


def tokens_of_rows(tokenizer: Any, settings: PackingSettings) -> tuple[TokenUse, ...]:
    """The tokens that packing adds to rows of these settings, in the order of a row.

    Args:
        tokenizer, settings: as for :func:`special_ids`.

    Raises:
        RopewalkError: as :func:`special_ids` and :meth:`PackingSettings.bos_policy`.
    """
    special = special_ids(tokenizer, settings)
    policy = settings.bos_policy(special)
    bos = _use(tokenizer, settings, "bos_token")
    eos = _use(tokenizer, settings, "eos_token")
    found = []
    if settings.pattern == "anchor":
        own = settings.anchor_token
        token, origin, chosen = (
            (own, "anchor_token", True) if own is not None else bos or eos or ("", "", False)
        )
        found.append(TokenUse("anchor", token, origin, chosen))
    elif policy != "none" and bos is not None:
        found.append(TokenUse(f"{policy} start", *bos))
    if settings.eos and eos is not None:
        found.append(TokenUse("document end", *eos))
    return tuple(found)


def _use(tokenizer: Any, settings: RowPolicies, name: str) -> tuple[str, str, bool] | None:
    """Text and origin of a token, and whether a setting names it; None if there is none."""
    chosen, own = getattr(settings, name), getattr(tokenizer, name)
    if chosen is None and own is None:
        return None
    return (str(own), name, False) if chosen is None else (chosen, name, True)


@dataclass(frozen=True)
class Doubt:
    """A token that a tokenizer names for chats, though it has one for documents.

    Attributes:
        setting: ``bos_token`` or ``eos_token``.
        token: the tokenizer's own token.
        likely: the likely token of pretraining.
    """

    setting: str
    token: str
    likely: str

    def __str__(self) -> str:
        return (
            f"the tokenizer's {self.setting} {self.token} marks turns of chats in its chat template; if the base model "
            f"was pretrained on documents with {self.likely} between them, set {self.setting} to {self.likely}"
        )


def doubtful_tokens(tokenizer: Any) -> Iterator[Doubt]:
    """The tokenizer's own BOS and EOS, where they probably do not belong to documents.

    Instruction-tuned checkpoints name the marks of chat turns as BOS and EOS (``<|im_start|>``, ``<|im_end|>``,
    ``<|eot_id|>``), but their base models were pretrained on documents that another token separated.
    """
    template = tokenizer.chat_template
    written = " ".join(template.values()) if isinstance(template, dict) else template or ""
    separator = next((each for each in SEPARATORS if each in tokenizer.get_added_vocab()), None)
    for name in ("bos_token", "eos_token"):
        own = getattr(tokenizer, name)
        # A template that ends turns with the token that ends documents writes it by its variable.
        if separator is not None and own is not None and own != separator and own in written:
            yield Doubt(name, own, separator)
