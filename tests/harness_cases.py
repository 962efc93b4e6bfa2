"""A model, a tokenizer and made-up data for tests of lm_eval's tasks."""

from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.places import ROOT

DATA = ROOT / "tests" / "evaluation" / "harness_data"
CHAT = (
    "{% for m in messages %}<s>[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[answer]{% endif %}"
)


def harness_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, a BOS in front of every text, as Llama's; no padding token."""
    vocabulary = {character: number + 2 for number, character in enumerate(sorted(ByteLevel.alphabet()))}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    special = [("<s>", backend.token_to_id("<s>"))]
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT
    )


def harness_model(context: int = 1024, **config_values: Any) -> LlamaForCausalLM:
    """A random Llama over bytes; weights large enough that answers differ."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=257,
        **config_values,
    )
    return LlamaForCausalLM(config).eval()


class Parrot(nn.Module):
    """Finds every text likely that it was told, token by token, and all else unlikely; it has no weights."""

    def __init__(self, tokenizer: Any, told: list[str], context: int = 4096) -> None:
        super().__init__()
        self.told = [torch.tensor(tokenizer(text)["input_ids"]) for text in told]
        self.config = LlamaConfig(vocab_size=258, max_position_embeddings=context)
        self.generation_config = GenerationConfig(do_sample=True, temperature=9.0, repetition_penalty=3.0)
        self.device = torch.device("cpu")
        self.read: list[list[int]] = []
        self.asked: list[dict[str, Any]] = []

    def tie_weights(self) -> None:
        """Nothing to tie."""

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        assert not self.training
        logits = torch.zeros(*ids.shape, 258)
        for row, one in enumerate(ids):
            self.read.append(one.tolist())
            for text in self.told:
                most = min(len(text), len(one))
                same = int((text[:most] == one[:most]).int().cumprod(0).sum())
                for place in range(min(same, len(text) - 1)):
                    logits[row, place, text[place + 1]] += 20.0
        return SimpleNamespace(logits=logits)

    def generate(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        """Goes on with `` sailor 1`` whatever was asked, and remembers what that was."""
        assert not self.training
        self.read += [row[kept.bool()].tolist() for row, kept in zip(input_ids, attention_mask, strict=True)]
        self.asked.append({**settings, "own": self.generation_config})
        said = torch.tensor([[*b" sailor 1"]]) + 0
        return torch.cat([input_ids, self.byte_ids(said).expand(len(input_ids), -1)], dim=1)

    def byte_ids(self, values: torch.Tensor) -> torch.Tensor:
        """Ids of printable ASCII and spaces in the byte tokenizer."""
        order = sorted(ByteLevel.alphabet())
        places = [order.index("Ġ" if value == 32 else chr(value)) + 2 for value in values[0].tolist()]
        return torch.tensor([places])
