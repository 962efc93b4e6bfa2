"""Adapter from a model in memory to lm_eval, and a context that silences lm_eval's and its libraries' output."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import datasets
import lm_eval.api.task
import torch
from lm_eval.models.huggingface import HFLM

from ropewalk.errors import RunFailure
from ropewalk.models.rope.generation import generating

NAMES = ("lm_eval", "datasets", "huggingface_hub", "absl", "jieba")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Suppress log lines, progress bars and warnings of lm_eval, datasets, huggingface_hub and transformers."""
    from transformers.utils import logging as transformers_logging

    levels = {name: logging.getLogger(name).level for name in NAMES}
    verbosity, bars = transformers_logging.get_verbosity(), datasets.are_progress_bars_disabled()
    bar_of_tasks = lm_eval.api.task.tqdm
    for name in NAMES:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    transformers_logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
    # lm_eval 0.4 has no option for this bar.
    lm_eval.api.task.tqdm = _no_bar
    try:
        with warnings.catch_warnings():
            for message, category in IGNORED:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        lm_eval.api.task.tqdm = bar_of_tasks
        if not bars:
            datasets.enable_progress_bars()
        transformers_logging.set_verbosity(verbosity)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


IGNORED: tuple[tuple[str, type[Warning]], ...] = (
    ("Using slow pure-python SequenceMatcher", UserWarning),
    ("invalid escape sequence", SyntaxWarning),
    ("invalid escape sequence", DeprecationWarning),
    ("pkg_resources is deprecated", UserWarning),
)
"""Warnings that do not concern the user: patterns for the beginning of their messages, and categories."""


def _no_bar(items: Iterable[Any], **named: Any) -> Iterable[Any]:
    return items


class HarnessModel(HFLM):  # type: ignore[misc]  # lm_eval has no types
    """lm_eval's wrapper around a model in memory, extended to report what it truncates.

    lm_eval silently truncates prompts that are too long at the beginning. This class records them, and with ``middle``
    it truncates prompts of generation tasks in the middle instead, as LongBench does.

    Args:
        model: a causal model; its weights, mode and settings are left unchanged.
        tokenizer: the model's tokenizer; a copy is used, because lm_eval sets a padding token.
        max_length: maximum number of tokens of prompt and answer together.
        batch_size: prompts per batch.

    Attributes:
        middle: truncate prompts of generation tasks in the middle instead of at the beginning.
        truncated: truncated requests: (context, continuation) for likelihoods, the context for generation tasks.
        progress: called with the number of completed requests and the total, or None.
    """

    def __init__(self, model: Any, tokenizer: Any, max_length: int, batch_size: int) -> None:
        # HFLM warns about a model that is passed in as an object.
        with quiet_libraries():
            super().__init__(
                pretrained=model,
                backend="causal",
                tokenizer=copy.deepcopy(tokenizer),
                batch_size=batch_size,
                max_length=max_length,
            )
        self.middle = False
        self.truncated: set[str | tuple[str, str]] = set()
        self.progress: Callable[[int, int], None] | None = None
        self.set_cache_hook(self)
        self._done = self._total = 0

    def add_partial(self, attribute: str, request: Any, result: Any) -> None:
        """Report progress; lm_eval calls this hook of its answer cache for each answer, and nothing is cached here."""
        self._done += 1
        if self.progress is not None:
            self.progress(self._done, self._total)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        self._done, self._total = 0, len(requests)
        # lm_eval's own bar stays off, because add_partial reports progress.
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        self._done, self._total = 0, len(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        self._done, self._total = 0, len(requests)
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                raise RunFailure(
                    f"lm_eval can score only answers of 1 to {self.max_length} tokens (max_length), got an answer of "
                    f"{len(continuation)}"
                )
            # The last token is predicted but never an input, hence + 1. Windows of a rolling likelihood have no texts.
            if texts is not None and len(context) + len(continuation) > self.max_length + 1:
                self.truncated.add(tuple(texts))
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # One by one, not as a padded batch, so that each row's own length shows what is cut.
        rows = [self.tok_encode(text) for text in strings]
        if left_truncate_len:
            for index, row in enumerate(rows):
                if len(row) > left_truncate_len:
                    # By its text, by which harness._request_key looks it up.
                    self.truncated.add(strings[index])
                    rows[index] = cut(row, left_truncate_len, self.middle)
        padded = self.tokenizer.pad(
            {"input_ids": rows}, padding_side=padding_side, return_attention_mask=True, return_tensors="pt"
        )
        return padded["input_ids"], padded["attention_mask"]

    def _model_call(self, inps: torch.Tensor, *args: Any, **named: Any) -> Any:
        # Likelihoods take one pass over a padded batch, without a cache, so its length is the total.
        with generating(self.model, inps.shape[1]):
            return super()._model_call(inps, *args, **named)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> Any:
        """Generate greedily, ignoring sampling settings of the task and the checkpoint."""
        mask = generation_kwargs["attention_mask"]
        with torch.no_grad(), _only_special_tokens(self.model), generating(self.model, max_length):
            return super()._model_generate(context, max_length, stop, attention_mask=mask, do_sample=False)


def cut(ids: list[int], most: int, middle: bool) -> list[int]:
    """Truncate a prompt to at most ``most`` tokens.

    Args:
        ids: token ids of the prompt.
        most: maximum number of tokens, at least 1.
        middle: remove the middle, as LongBench's ``pred.py`` does; otherwise the beginning, as lm_eval does.
    """
    if len(ids) <= most:
        return ids
    head = most // 2 if middle else 0
    return ids[:head] + ids[len(ids) - (most - head) :]


@contextmanager
def _only_special_tokens(model: Any) -> Iterator[None]:
    """Replace the checkpoint's generation config by one with only its special tokens, without sampling or penalties."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
    try:
        yield
    finally:
        model.generation_config = own
