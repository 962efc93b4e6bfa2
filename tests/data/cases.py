"""Packing runs as tests write them: settings that are changed and checked again, and a tokenizer that is loaded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pydantic import ValidationError

from ropewalk.data import PackedRows, pack_rows, prepare_rows
from ropewalk.data.settings import PackConfig, PackingSettings, SourceSpec
from ropewalk.io.settings import Settings, explain

Model = TypeVar("Model", bound=Settings)


def changed(settings: Model, **changes: Any) -> Model:
    """The same settings but for some, checked as a whole."""
    return type(settings)(**{**dict(settings), **changes})


@dataclass(frozen=True)
class Job:
    """What is packed, and the tokenizer: a folder, or one that is loaded."""

    config: PackConfig
    tokenizer: Any

    @classmethod
    def of(cls, specs: Sequence[SourceSpec], tokenizer: Any, rows: PackingSettings, **options: Any) -> "Job":
        named = tokenizer if isinstance(tokenizer, str) else tokenizer.name_or_path
        given = {name: each for name, each in options.items() if each is not None}
        return cls(PackConfig(sources=specs, tokenizer=named, rows=rows, **given), tokenizer)

    @property
    def loaded(self) -> Any:
        return None if isinstance(self.tokenizer, str) else self.tokenizer

    def pack(
        self,
        folder: Path,
        *,
        tokens: Path | None = None,
        workers: int = 1,
        shard: tuple[int, int] = (0, 1),
        **progress: Any,
    ) -> PackedRows:
        """Pack into a folder."""
        work = {"token_store": tokens, "workers": workers, "shard": shard}
        return pack_rows(changed(self.config, work=work), folder, tokenizer=self.loaded, **progress)

    def prepare(self, cache_dir: Path, *, workers: int = 1, **progress: Any) -> PackedRows:
        """Pack into a folder below a cache, or find what is there."""
        config = changed(self.config, work={"workers": workers})
        return prepare_rows(config, cache_dir, tokenizer=self.loaded, **progress)


def refusal(model: type[Settings], **values: Any) -> str:
    """The sentence in which settings are refused."""
    with pytest.raises(ValidationError) as refused:
        model(**values)
    return explain(refused.value, model)
