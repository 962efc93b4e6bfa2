"""Drafts that are as they are, made samples: for prompts whose units are chosen otherwise than by their number."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.evaluation.fitting import Draft, Form
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.sample import Sample


def counted_samples(
    form: Form, encoder: PromptEncoder, length: int, indices: Sequence[int], drafts: Sequence[Draft]
) -> list[Sample]:
    """Drafts with their tokens counted, all at once.

    Args:
        form: what the samples share.
        encoder: counts the tokens.
        length: tokens that prompt and answer may take together; that they do is for the caller to see.
        indices: each sample's number.
        drafts: as many.
    """
    counts = encoder.counts([(each.text, each.answer_prefix) for each in drafts])
    return [
        Sample(
            form.suite,
            form.task,
            length,
            index,
            draft.text,
            draft.answer_prefix,
            draft.references,
            form.metric,
            form.max_new_tokens,
            tokens,
            encoder.bos_count(draft.text, draft.answer_prefix),
            draft.details,
        )
        for index, draft, tokens in zip(indices, drafts, counts, strict=True)
    ]
