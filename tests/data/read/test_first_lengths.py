"""The lengths of documents are estimated from the tokens of a few, and from no more text than that needs."""

import pytest

from ropewalk.data import load_tokenizer
from ropewalk.data.read import first_lengths as first
from ropewalk.data.read.first_lengths import first_lengths
from ropewalk.data.settings import SourceSpec
from ropewalk.parallel.context import RunContext


def test_long_documents_are_counted_from_their_beginnings(tmp_path):
    class Counting:
        """A tokenizer that remembers how much text it was given."""

        characters = 0

        def encode_batch_fast(self, texts, **options):
            self.characters += sum(map(len, texts))
            return list(real.backend_tokenizer.encode_batch_fast(texts, **options))

        @property
        def backend_tokenizer(self):
            return self

    real, counting = load_tokenizer("embedded"), Counting()
    sentence = "def f(x):\n    return x + 1\n"
    texts = [sentence * times for times in (3, 20, 3000)]
    for name, text in enumerate(texts):
        (tmp_path / f"{name}.txt").write_text(text)
    lengths, complete = first_lengths([SourceSpec(path=str(tmp_path))], counting, RunContext())
    exact = [len(real.backend_tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert counting.characters < 25_000 < len(texts[-1])
    assert complete
    assert lengths == pytest.approx(exact, rel=0.05)


def test_no_more_than_the_first_documents_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(first, "READ", 2)
    (tmp_path / "texts.jsonl").write_text('{"text": "a b c"}\n' * 3)
    lengths, complete = first_lengths(
        [SourceSpec(path=str(tmp_path / "texts.jsonl"))], load_tokenizer("embedded"), RunContext()
    )
    assert (len(lengths), complete) == (2, False)
