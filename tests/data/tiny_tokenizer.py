"""A tokenizer that tests make themselves, and texts that try it."""

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

TEXTS = ["The first document.", "Zweites Dokument, größer — 二 🙂", "third\nwith two lines", "a" * 700]


def make_tokenizer(
    bos: str | None = "<s>", eos: str | None = "</s>", first: int = 2
) -> PreTrainedTokenizerFast:
    """One token a byte: every text is representable and its length is known beforehand.

    With the first id 2, the special tokens have the ids of two bytes as well, so only with 0 every text comes back.
    """
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({character: number + first for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (bos, eos) if token])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos)
