"""What lm_eval and the libraries below it say on their own is kept from the terminal while they work for us."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import lm_eval.api.task

NAMES = ("lm_eval", "datasets", "huggingface_hub", "absl", "jieba")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """No log lines, bars and warnings of lm_eval, datasets, the hub and transformers while open."""
    from transformers.utils import logging as transformers_logging

    levels = {name: logging.getLogger(name).level for name in NAMES}
    verbosity, bars = transformers_logging.get_verbosity(), datasets.are_progress_bars_disabled()
    bar_of_tasks = lm_eval.api.task.tqdm
    for name in NAMES:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    transformers_logging.set_verbosity(logging.CRITICAL)
    datasets.disable_progress_bars()
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
"""Messages (the beginning, as a pattern) and categories of warnings that say nothing to our user."""


def _no_bar(items: Iterable[Any], **named: Any) -> Iterable[Any]:
    return items
