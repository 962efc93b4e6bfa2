"""Tokenizers and a text that tests of RULER make themselves."""

import random
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import ropewalk
from ropewalk.evaluation.tasks.ruler.templates import CWE, FWE, NIAH, NOISE_LINE, QA, VT

DEMO = Path(ropewalk.__file__).parent / "data" / "demo_model"


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    return _byte_level(_bytes(), [])


@cache
def template_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that spells the words of RULER's templates in one token, and anything else byte by byte.

    It is written down and not trained, so that it is the same with every version of every library.
    """
    said = " ".join(
        [NOISE_LINE, *(part for t in (CWE, FWE, NIAH, QA, VT) for part in (t.question, t.answer))]
    )
    words = {word.strip(".,?:(){}'\n") for word in said.replace("\n", " ").split(" ")}
    vocabulary, merges = _bytes(), []
    for word in sorted(w for w in words if w.isalpha()):
        for piece in ("Ġ" + word, word):
            for end in range(2, len(piece) + 1):
                if piece[:end] not in vocabulary:
                    vocabulary[piece[:end]] = len(vocabulary) + 2
                    merges.append((piece[: end - 1], piece[end - 1]))
    return _byte_level(vocabulary, merges)


@cache
def demo_tokenizer() -> PreTrainedTokenizerFast:
    """The demo model's byte-level BPE."""
    return AutoTokenizer.from_pretrained(DEMO)


@cache
def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """BPE as SentencePiece writes it: a sign for the space, also before the first word; unknown letters in bytes."""
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False)
    said = [part for t in (CWE, FWE, NIAH, QA, VT) for part in (t.question, t.answer)]
    backend.train_from_iterator([NOISE_LINE, *said, prose(2000)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


TOKENIZERS = {"bytes": byte_tokenizer, "bpe": demo_tokenizer, "metaspace": metaspace_tokenizer}


def prose(words: int, seed: int = 0) -> str:
    """Sentences of made-up words: abbreviations, quotes, names and numbers among them."""
    draw = random.Random(f"prose {seed}")
    made: list[str] = []
    while len(made) < words:
        sentence = [_word(draw) for _ in range(draw.randint(2, 18))]
        sentence[0] = sentence[0].capitalize()
        if draw.random() < 0.2:
            sentence.insert(
                1, draw.choice(["Mr. Ulo", "e.g.", "J. Rom", "U.S. Vela", "1995", "etc.", '"Ema"'])
            )
        if draw.random() < 0.1:
            sentence[0], sentence[-1] = f'"{sentence[0]}', f'{sentence[-1]}."'
        else:
            sentence[-1] += draw.choice([".", ".", ".", ".", "?", "!", "...", ".)"])
        made += " ".join(sentence).split(" ")
    return " ".join(made[:words])


def _bytes() -> dict[str, int]:
    return {
        character: number + 2 for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }


def _byte_level(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def _word(draw: random.Random) -> str:
    return "".join(draw.choice("bdfgklmnprstv") + draw.choice("aeiou") for _ in range(draw.randint(1, 4)))
