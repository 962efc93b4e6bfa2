"""A model reads each document of a prepared row as if it were alone, however the row was made."""

import numpy as np
import pytest
import torch
import transformers

from ropewalk.attention import ENGINES
from ropewalk.attention.layout import IGNORED
from ropewalk.data.rows.assemble import PADDING, assemble_rows, pack_documents
from ropewalk.data.rows.special_tokens import DocumentEnds
from ropewalk.data.rows.training_rows import training_row
from ropewalk.data.settings import InterleaveSettings, PackingSettings
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.models.load import attach

CONTEXT, BOS, EOS = 96, 0, 1
SPECIAL = SpecialTokens(BOS, EOS, BOS)
LENGTHS = [17, 30, 9, 22, 40, 5, 13]
TAG = [np.array([2, 3], np.int32)]


class Documents:
    """Random documents without special tokens."""

    def __init__(self) -> None:
        words = np.random.Philox(3).random_raw(sum(LENGTHS)) % 60 + 4
        self.ids = np.split(words.astype(np.int32), np.cumsum(LENGTHS)[:-1])
        self.ends = DocumentEnds(
            np.array(LENGTHS, np.int64),
            np.array([each[0] for each in self.ids], np.int32),
            np.array([each[-1] for each in self.ids], np.int32),
            np.zeros(len(LENGTHS), np.int32),
        )

    def read_tokens(self, number: int, first: int, out: np.ndarray) -> None:
        out[:] = self.ids[number][first : first + len(out)]


def model() -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("engine", [each for each in ENGINES if each in ("reference", "sdpa")])
@pytest.mark.parametrize("pattern", ["intra_document", "anchor"])
@pytest.mark.parametrize("positions", ["reset", "continuous"])
def test_interleaved_tagged_and_padded_documents_are_read_as_if_alone(
    pattern: str, positions: str, engine: str
) -> None:
    documents, net = Documents(), model()
    attach(net, engine)
    settings = PackingSettings(
        context=CONTEXT, pattern=pattern, positions=positions, tag="{source}", packing="best_fit", remainder="pad",
        interleave=InterleaveSettings(min_length=4, max_length=60, parts=(2, 3)),
    )  # fmt: skip
    numbers = np.arange(len(LENGTHS))
    plan = pack_documents(numbers, documents.ends, ["source"], settings, SPECIAL, TAG)
    seen, interleaved = set(), False
    for packed in assemble_rows(plan, documents, 0, plan.num_rows):
        row = training_row(packed, settings)
        interleaved |= row.layout.is_interleaved
        with torch.no_grad():
            logits = net(row.input_ids[None], layout=row.layout).logits[0]
        ids = row.layout.document_ids
        for document, number in enumerate(packed.numbers):
            if number == PADDING:
                continue
            places = torch.nonzero(ids == document)[:, 0]
            # Under the pattern anchor the row's first token stands before each document.
            alone = torch.cat([torch.zeros(1, dtype=torch.int64), places]) if pattern == "anchor" else places
            position_ids = row.layout.position_ids[alone]
            with torch.no_grad():
                own = net(row.input_ids[alone][None], position_ids=position_ids[None]).logits[0]
            # Two layers of 32 channels in float32; a token that sees one key too many is off by 1e-3 and more.
            torch.testing.assert_close(logits[places], own[-len(places) :], rtol=0, atol=1e-6)
            framed = [
                *([BOS] if pattern == "intra_document" else []),
                2,
                3,
                *documents.ids[number].tolist(),
                EOS,
            ]
            assert row.input_ids[places].tolist() == framed
            tagged = framed.index(2)
            targets = [IGNORED if n in (tagged, tagged + 1) else token for n, token in enumerate(framed)]
            assert row.labels[places].tolist() == [*targets[1:], IGNORED]
            seen.add(number)
    assert seen == set(range(len(LENGTHS)))
    assert interleaved
