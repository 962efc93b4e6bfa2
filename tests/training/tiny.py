"""A word-level tokenizer for the tiny checkpoint."""

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ("tar", "hemp", "yarn", "strand", "twist", "walk", "rope", "lay", "hook", "post", "fid", "cord")


def save_tokenizer(folder, bos="<s>", eos="</s>"):
    """A word-level tokenizer, with or without its special tokens."""
    special = [token for token in (bos, eos) if token]
    vocabulary = {token: i for i, token in enumerate([*special, "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, unk_token="<unk>"
    )
    wrapped.save_pretrained(folder)
