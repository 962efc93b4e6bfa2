"""Tokenizers and models that tests of the evaluation make themselves."""

import re
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropewalk.attention.layout import Row
from ropewalk.evaluation.backends.likelihoods import row_losses
from ropewalk.evaluation.backends.protocol import evaluating
from ropewalk.evaluation.tasks.passkey import NEEDLE, NOISE_WORDS, QUESTION, TASK
from ropewalk.evaluation.tasks.perplexity import PerplexityResult, perplexity_of
from ropewalk.models.compute.losses import OutputHead


def byte_tokenizer(bos: str | None = "<s>", template: bool = False) -> PreTrainedTokenizerFast:
    """One token a byte; ``template`` makes plain calls add a BOS, as Llama's tokenizers do."""
    return _wrapped(Tokenizer(BPE(_bytes(), [])), bos, template)


def word_tokenizer(bos: str | None = "<s>") -> PreTrainedTokenizerFast:
    """One token a word of the passkey prompt, and one a byte for all else."""
    words = {word.strip(".?") for text in (TASK, NEEDLE, QUESTION) for word in text.split(" ")}
    words |= {word.strip(".") for word in NOISE_WORDS}
    vocabulary, merges = _bytes(), []
    for word in sorted(w for w in words if w.isalpha()):
        for piece in ("Ġ" + word, word):
            for end in range(2, len(piece) + 1):
                if piece[:end] not in vocabulary:
                    vocabulary[piece[:end]] = len(vocabulary)
                    merges.append((piece[: end - 1], piece[end - 1]))
    return _wrapped(Tokenizer(BPE(vocabulary, merges)), bos, False)


def _bytes() -> dict[str, int]:
    return {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))}


def _wrapped(backend: Tokenizer, bos: str | None, template: bool) -> PreTrainedTokenizerFast:
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(t, special=True) for t in (bos, "</s>") if t])
    if template and bos:
        special = [(bos, backend.token_to_id(bos))]
        backend.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token="</s>")


def tiny_llama(vocab_size: int = 97, seed: int = 0, **extra: Any) -> LlamaForCausalLM:
    """A random Llama with transformers' own attention and rotary module; weights large enough to matter."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        attn_implementation="eager",
        **extra,
    )
    return LlamaForCausalLM(config).eval()


class AnsweringModel(nn.Module):
    """Answers prompts by a function of the prompt's text and its number; it has no weights."""

    def __init__(self, tokenizer: Any, answer: Callable[[str, int], str], rotary: nn.Module | None = None):
        super().__init__()
        self.tokenizer, self.answer = tokenizer, answer
        self.rotary = rotary
        self.device = torch.device("cpu")
        self.generation_config = GenerationConfig(do_sample=True, temperature=9.0)
        self.config = LlamaConfig(max_position_embeddings=600)
        self.prompts: list[list[int]] = []

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, generation_config: GenerationConfig
    ) -> torch.Tensor:
        assert attention_mask.all()
        assert not self.training
        ids = input_ids[0].tolist()
        text = self.answer(self.tokenizer.decode(ids, skip_special_tokens=True), len(self.prompts))
        self.prompts.append(ids)
        new = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor([[*ids, *new[: generation_config.max_new_tokens]]])


def said_key(prompt: str) -> str:
    """The key that a passkey prompt says."""
    found = re.search(r"The pass key is (\d+)\. Remember it\. (\d+) is the pass key\.", prompt)
    assert found is not None
    assert found[1] == found[2]
    return found[1]


def knows(prompt: str, number: int) -> str:
    return f" {said_key(prompt)}. 99"


def says_nothing(prompt: str, number: int) -> str:
    return ""


def knows_every_second(prompt: str, number: int) -> str:
    return knows(prompt, number) if number % 2 else " I do not know"


def perplexity_by_position(
    model: Any, head: OutputHead, rows: list[Row], edges: list[int]
) -> PerplexityResult:
    """Perplexity of rows by position, with the given head; see :func:`perplexity_of`."""
    with evaluating(model):
        return perplexity_of([row_losses(model, head, row) for row in rows], rows, edges)
