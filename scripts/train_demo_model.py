"""Train the embedded demo checkpoint: a byte-level BPE tokenizer and a one-million-parameter Llama.

    OMP_NUM_THREADS=1 python scripts/train_demo_model.py

It takes about an hour on one core.

The model is trained at a context of 256 tokens on two things, and on nothing else:

- the training split of the embedded corpus: the standard library sources and documentation topics of the
  Python that runs this script;
- synthetic retrieval rows that this script makes from the seed: repeated strings of digits for the first
  COPYING_STEPS steps, from which the model learns to copy (a trial on mixed rows alone, with the plain
  initialisation, had not learned it after seven million tokens), and after that in a share of
  RETRIEVAL_SHARE of the rows passkey prompts in the format of the evaluation, lines ``name = digits`` that
  are asked for again, and repeated digits. Without them a model of this size does not look up what it has
  read, and there would be nothing to see when its context is extended. The tokenizer has seen passkey
  prompts too.

A row begins with ``<s>``; documents in it are separated by ``</s><s>``. The seed fixes the data and the
initial weights; the result is the same up to floating-point noise on the same Python and library versions.
The folder is written beside its place and renamed, first at the snapshots and then at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropewalk.data.read.embedded import embedded_documents

CONTEXT = 256
BATCH_ROWS = 16
VOCAB_SIZE = 1536
SEED = 20241
LEARNING_RATE = 4e-3
WARMUP_STEPS = 100
FINAL_LEARNING_RATE_SHARE = 0.02
COPYING_STEPS = 750
RETRIEVAL_SHARE = 0.35
PASSKEY_SHARE_OF_RETRIEVAL = 0.5
LARGEST_WEIGHTS_FILE = 4_000_000

BOS, EOS = "<s>", "</s>"
COPYING_ALPHABET = "0123456789 ="
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
PASSKEY_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
PASSKEY_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
PASSKEY_QUESTION = "What is the pass key? The pass key is"


def passkey_text(rng: random.Random) -> str:
    """A passkey prompt with its answer: the needle at a uniform depth of up to 40 noise sentences."""
    key = rng.randint(1, 50_000)
    sentences = rng.randint(0, 40)
    before = rng.randint(0, sentences)
    parts = [
        PASSKEY_TASK,
        " ".join(islice(cycle(NOISE), before)),
        PASSKEY_NEEDLE.format(key=key),
        " ".join(islice(cycle(NOISE), sentences - before)),
        f"{PASSKEY_QUESTION} {key}",
    ]
    return "\n".join(parts)


def assignments_text(rng: random.Random, names: list[str]) -> str:
    """Lines ``name = digits`` of distinct names, then the same lines in another order."""
    chosen = rng.sample(names, rng.randint(2, 10))
    lines = [f"{name} = {rng.randint(1, 50_000)}" for name in chosen]
    return "\n".join(lines + rng.sample(lines, len(lines)))


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE whose digits stand alone, so that a number can be copied digit by digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
    )


class RowMaker:
    """Training rows of CONTEXT token ids, in an order that the seed alone decides."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: list[str], seed: int) -> None:
        self.rng = random.Random(seed)
        self.tokenizer = tokenizer
        self.bos, self.eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.documents = [self.encode(text) for text in texts]
        self.copying_ids = [id for character in COPYING_ALPHABET for id in self.encode(character)]
        self.names = sorted({word for text in texts for word in text.split() if word.isidentifier()})
        self.stream = self._stream()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _stream(self) -> Iterator[int]:
        """The documents without end, each epoch in a new order."""
        while True:
            for index in self.rng.sample(range(len(self.documents)), len(self.documents)):
                yield from self.documents[index]
                yield self.eos
                yield self.bos

    def next_row(self, copying: bool) -> list[int]:
        """One row: ``<s>``, retrieval documents for a share of the rows, then as much corpus as fits.

        Args:
            copying: fill the whole row with repeated digits instead.
        """
        row = [self.bos]
        if copying:
            row += self._until_full(self._repeated_digits)
        elif self.rng.random() < RETRIEVAL_SHARE:
            if self.rng.random() < PASSKEY_SHARE_OF_RETRIEVAL:
                row = [*self.passkey_row(), self.bos]
            else:
                row += self._until_full(self.rng.choice([self._repeated_digits, self._assignments]))
        row += (next(self.stream) for _ in range(CONTEXT - len(row)))
        return row[:CONTEXT]

    def passkey_row(self) -> list[int]:
        """``<s>``, one passkey document, ``</s>``; drawn again until it fits a row."""
        while True:
            ids = [self.bos, *self.encode(passkey_text(self.rng)), self.eos]
            if len(ids) <= CONTEXT:
                return ids

    def _until_full(self, make_document: Callable[[], list[int]]) -> list[int]:
        ids: list[int] = []
        while len(ids) < CONTEXT:
            ids += [*make_document(), self.eos, self.bos]
        return ids

    def _repeated_digits(self) -> list[int]:
        period = self.rng.choices(self.copying_ids, k=self.rng.randint(3, 16))
        length = self.rng.randint(2 * len(period), max(2 * len(period), 50))
        return (period * length)[:length]

    def _assignments(self) -> list[int]:
        return self.encode(assignments_text(self.rng, self.names))

    def next_batch(self, copying: bool) -> torch.Tensor:
        return torch.tensor([self.next_row(copying) for _ in range(BATCH_ROWS)])


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama with grouped-query attention and tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=272,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    with torch.no_grad():  # a part that all tokens share lets heads attend by position alone from the start
        model.model.embed_tokens.weight += config.initializer_range * torch.randn(config.hidden_size)
    return model


def row_loss(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: int = 128) -> float:
    """Nats a token over rows spread evenly over the embedded validation split."""
    ids: list[int] = []
    for document in embedded_documents("validation"):
        ids += [*tokenizer.encode(document.text, add_special_tokens=False), tokenizer.eos_token_id]
    starts = range(0, len(ids) - CONTEXT, max(1, (len(ids) - CONTEXT) // rows))
    batch = torch.tensor([[tokenizer.bos_token_id, *ids[start : start + CONTEXT - 1]] for start in starts])
    model.eval()
    loss = sum(row_loss(model, part).item() * len(part) for part in batch.split(BATCH_ROWS)) / len(batch)
    model.train()
    return loss


@torch.no_grad()
def passkey_accuracy(model: LlamaForCausalLM, maker: RowMaker, samples: int = 64) -> float:
    """Share of keys whose every token, the end included, is the most probable one (teacher-forced)."""
    model.eval()
    right = 0
    for _ in range(samples):
        row = maker.passkey_row()
        answer = row[::-1].index(maker.encode(PASSKEY_QUESTION)[-1])
        best = model(input_ids=torch.tensor([row]), use_cache=False).logits[0].argmax(-1)
        right += best[-answer - 1 : -1].tolist() == row[-answer:]
    model.train()
    return right / samples


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, facts: dict) -> None:
    """Write the folder under a temporary name, check its size, and rename it."""
    partial = out.with_name(f"{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "model.safetensors").chmod(0o644)  # written for its owner alone, which a wheel would keep
    (partial / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    size = (partial / "model.safetensors").stat().st_size
    if size > LARGEST_WEIGHTS_FILE:
        raise SystemExit(
            f"model.safetensors has {size} bytes; at most {LARGEST_WEIGHTS_FILE} may be shipped."
        )
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


def learning_rate(step: int, steps: int, peak: float) -> float:
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return peak * (FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    default_out = Path(__file__).resolve().parents[1] / "src" / "ropewalk" / "data" / "demo_model"
    parser.add_argument("--out", type=Path, default=default_out, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--snapshot-minutes", type=float, default=10.0, help="time between snapshots")
    args = parser.parse_args(arguments)

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    texts = [document.text for document in embedded_documents("train")]
    rng = random.Random(SEED)
    tokenizer = train_tokenizer([*texts, *(passkey_text(rng) for _ in range(500))])
    maker = RowMaker(tokenizer, texts, seed=SEED)
    model = build_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters, {sum(map(len, maker.documents))} tokens of corpus", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1)
    facts = {
        "planned_steps": args.steps,
        "batch_tokens": BATCH_ROWS * CONTEXT,
        "seed": SEED,
        "copying_steps": COPYING_STEPS,
        "retrieval_share": RETRIEVAL_SHARE,
        "parameters": parameters,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    started = last_snapshot = time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.learning_rate)
        loss = row_loss(model, maker.next_batch(copying=step < COPYING_STEPS))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        done = step + 1
        if done % 50 == 0:
            rate = done * BATCH_ROWS * CONTEXT / (time.monotonic() - started)
            print(f"step {done:5d}  loss {loss.item():.3f}  {rate:.0f} tokens/s", flush=True)
        if done == args.steps or time.monotonic() - last_snapshot > args.snapshot_minutes * 60:
            facts |= {"step": done, "validation_loss": round(validation_loss(model, tokenizer), 4)}
            accuracy = passkey_accuracy(model, RowMaker(tokenizer, [], seed=SEED + 1))
            print(
                f"step {done:5d}  validation loss {facts['validation_loss']}  passkey {accuracy:.2f}",
                flush=True,
            )
            save(model, tokenizer, args.out, facts)
            last_snapshot = time.monotonic()
    print(f"{args.out}: {args.steps} steps in {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
