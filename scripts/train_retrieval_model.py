"""Train the embedded checkpoint ``embedded:retrieval``: a small Llama that retrieves within 256 tokens.

    OMP_NUM_THREADS=1 python scripts/train_retrieval_model.py --output retrieval-model
    ropewalk eval retrieval-model --suite passkey,ruler --tasks niah_single_1,niah_multikey_2,vt --lengths 256,512,1k

The tokenizer is a byte-level BPE over the embedded corpus and keys, with digits and capital letters that stand
alone, and one token for each fixed phrase of the benchmarks' prompts, so that all four tasks fit into 256 tokens.
The model is trained on drills (random keys with digits, asked for again), then on documents like those of
``embedded:retrieval-documents`` and the embedded corpus.

Three things make that a matter of minutes. The first layer's heads begin as heads that look back a fixed number of
tokens, by their rotation alone, and the second layer's as heads that attend to what followed the same tokens.
The matrices are trained by Muon. And the drills come first.

The seed fixes data and initial weights; the result is the same up to floating-point noise on the same versions.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from retrieval_rows import BOS_ID, EOS_ID, RowMaker, Stage, batch_of
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention

from ropewalk.data.read.embedded import embedded_documents
from ropewalk.data.read.retrieval import (
    CHAIN_TASK,
    NEEDLE_TASK,
    NOISE_SENTENCES,
    PASSKEY_TASK,
    ExamWriter,
)
from ropewalk.evaluation.tasks.words import key_words, words_unavailable

PHRASES = (
    PASSKEY_TASK,
    "The pass key is",
    ". Remember it.",
    " is the pass key.",
    "What is the pass key? The pass key is",
    NEEDLE_TASK,
    "One of the special magic numbers for",
    " is:",
    "What is the special magic number for",
    " mentioned in the provided text? The special magic number for",
    " mentioned in the provided text is",
    f"{CHAIN_TASK}\n\n",
    "VAR",
    " = VAR",
    "Question: Find all variables that are assigned the value",
    " in the text above. Answer: According to the chain(s) of variable assignment in the text above, "
    "5 variables are assigned the value",
    ", they are: ",
    *NOISE_SENTENCES,
    *(f" {sentence}" for sentence in NOISE_SENTENCES),
    " Here we go. There and back again.\n",
)
"""The fixed parts of the documents, for a tokenizer in which each is one token."""

CONTEXT = 256
VOCAB_SIZE = 2048
HIDDEN_SIZE, LAYERS, HEADS, HEAD_DIM = 128, 3, 8, 32
ROPE_THETA = 10_000.0
EMBEDDING_STD = 0.08
LOOK_BACK = (1, 2, 3, 4, 5, 6, 7, 10)
"""Distance of each of the first layer's heads; a name's last letter stands 10 tokens after what it is assigned to."""
LOOK_BACK_SHARPNESS = 3.0
MATCH_SHARPNESS = 2.0
BATCH_TOKENS = 4096
MATRIX_RATE, OTHER_RATE = 0.01, 0.003
WARMUP_STEPS = 30
FINAL_RATE_SHARE = 0.03

BOS, EOS = "<s>", "</s>"

STAGES = (
    Stage(0.10, 64, 1.0, 0.0),
    Stage(0.20, 128, 0.5, 0.1),
    Stage(1.00, CONTEXT, 0.05, 0.25),
)
LAST_STAGES = (Stage(1.00, CONTEXT, 0.0, 0.25, chains=0.45),)
"""Stages of a second training with moments and a learning rate of its own, which teaches chains of variables."""
LAST_STEPS_SHARE, LAST_RATE_SHARE = 0.4, 0.5


def train_tokenizer(
    corpus: Sequence[str], words: tuple[Sequence[str], Sequence[str]], seed: int
) -> PreTrainedTokenizerFast:
    """The tokenizer that the docstring above describes."""
    rng = random.Random(f"tokenizer {seed}")
    writer = ExamWriter(rng, words)
    tokenizer = Tokenizer(models.BPE())
    alone = Regex(r" ?\d|(?<=[A-Z])[A-Z]| ?[A-Z](?=[A-Z])")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(alone, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    keys = [f" {first}-{second}" for second in words[1] for first in rng.sample(words[0], 6)]
    keys += [f" {first}-{second}" for first in words[0] for second in rng.sample(words[1], 10)]
    numbers = [writer.needles(4, 0, 1).text for _ in range(300)] + [
        writer.chain(5, 0).text for _ in range(300)
    ]
    for phrase in sorted(PHRASES, key=len, reverse=True):
        numbers = [text.replace(phrase, "") for text in numbers]
    tokenizer.train_from_iterator(
        [*rng.sample(list(corpus), min(200, len(corpus))), *keys, *keys, *numbers],
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE - len(PHRASES),
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    phrases = [AddedToken(phrase, normalized=False) for phrase in PHRASES]  # codespell:ignore normalized
    tokenizer.add_tokens(phrases)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, BOS_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False
    )


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """An untrained Llama, begun as the docstring above says."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        shared = torch.randn(HIDDEN_SIZE)
        embedding = model.model.embed_tokens.weight
        # A part that all tokens share is what a head sees that attends by position alone.
        embedding.copy_(EMBEDDING_STD * (torch.randn_like(embedding) + shared))
        direction = shared / shared.norm()
        first, second = (layer.self_attn for layer in model.model.layers[:2])
        look_back(first, direction)
        match(first, second, direction)
    return model


def look_back(attention: LlamaAttention, shared: torch.Tensor) -> None:
    """Make each head attend as many tokens back as LOOK_BACK says.

    Args:
        attention: the first layer's, whose input has a part along ``shared`` in every token.
        shared: float ``[hidden_size]`` of norm 1.
    """
    half = HEAD_DIM // 2
    inv_freq = ROPE_THETA ** (-torch.arange(half) / half)
    # A normalised embedding has sqrt(hidden_size / 2) along the shared direction.
    scale = LOOK_BACK_SHARPNESS / math.sqrt(HIDDEN_SIZE / 2)
    queries = attention.q_proj.weight.view(HEADS, 2, half, HIDDEN_SIZE)
    keys = attention.k_proj.weight.view(HEADS, 2, half, HIDDEN_SIZE)
    for head, distance in enumerate(LOOK_BACK):
        angles = distance * inv_freq
        queries[head, 0] += scale * shared
        keys[head, 0] += scale * angles.cos()[:, None] * shared
        keys[head, 1] += scale * angles.sin()[:, None] * shared


def match(first: LlamaAttention, second: LlamaAttention, shared: torch.Tensor) -> None:
    """Make the second layer's heads attend to what followed an earlier occurrence of the same tokens.

    The first layer's heads all carry the same projection of the token that they attend to, each into directions of its
    own; a head of the second layer compares what one of them brought the query with what the next brought the key.
    """
    half = HEAD_DIM // 2
    slow = half // 2  # pairs that rotate little within the context
    size = HIDDEN_SIZE // HEADS
    directions = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)).Q
    projection = torch.linalg.qr(torch.randn(HIDDEN_SIZE, size)).Q.T
    projection = projection - (projection @ shared)[:, None] * shared
    values = first.v_proj.weight.view(HEADS, HEAD_DIM, HIDDEN_SIZE)
    outputs = first.o_proj.weight.view(HIDDEN_SIZE, HEADS, HEAD_DIM)
    for head in range(HEADS):
        values[head, :size] = projection
        outputs[:, head, :size] = directions[:, head * size : (head + 1) * size]
    queries = second.q_proj.weight.view(HEADS, 2, half, HIDDEN_SIZE)
    keys = second.k_proj.weight.view(HEADS, 2, half, HIDDEN_SIZE)
    copied = torch.linalg.qr(torch.randn(HIDDEN_SIZE, HIDDEN_SIZE)).Q
    for head in range(HEADS):
        near = head % 4  # the head that looks near + 1 tokens back
        for side, where in ((queries, near), (keys, near + 1)):
            brought = directions[:, where * size : (where + 1) * size].T.reshape(2, size // 2, HIDDEN_SIZE)
            side[head, :, half - size // 2 :] += MATCH_SHARPNESS * brought
        part = copied[:, head * size : (head + 1) * size]
        second.v_proj.weight.view(HEADS, HEAD_DIM, HIDDEN_SIZE)[head, :size] += part.T
        second.o_proj.weight.view(HIDDEN_SIZE, HEADS, HEAD_DIM)[:, head, :size] += part
    assert size // 2 <= slow


def weighted_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Weighted mean loss in nats, and the share of answers whose first token is the likeliest."""
    counts = weights[:, 1:] > 0
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits, targets, weight = model.lm_head(hidden[counts]), ids[:, 1:][counts], weights[:, 1:][counts]
    first = weight > 1
    right = (logits.argmax(-1) == targets)[first].float().mean().item()
    return weight @ F.cross_entropy(logits, targets, reduction="none") / weight.sum(), right


def optimizers_of(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embedding and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed_tokens" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed_tokens" in n]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=OTHER_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def rate_share(step: int, done: float) -> float:
    """Share of the peak learning rate: a warm-up, a constant half, and a straight way down."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, 2 * (1 - done) + FINAL_RATE_SHARE)


def stage_at(stages: Sequence[Stage], done: float) -> Stage:
    """The stage of a share of the training."""
    return next(stage for stage in stages if done < stage.until or stage is stages[-1])


def train(
    model: LlamaForCausalLM,
    maker: RowMaker,
    steps: int,
    stages: Sequence[Stage] = STAGES,
    peak_share: float = 1.0,
) -> None:
    """Train for a number of steps, with a share of the peak learning rates."""
    optimizers = optimizers_of(model)
    peaks = [
        (group, group["lr"] * peak_share) for optimizer in optimizers for group in optimizer.param_groups
    ]
    started, tokens = time.process_time(), 0
    for step in range(steps):
        done = step / steps
        stage = stage_at(stages, done)
        ids, weights = batch_of([maker.row(stage) for _ in range(BATCH_TOKENS // stage.length)])
        loss, right = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in peaks:
            group["lr"] = peak * rate_share(step, done)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens += ids.numel()
        if (step + 1) % 25 == 0:
            rate = tokens / (time.process_time() - started)
            print(
                f"step {step + 1:5d}  rows of {stage.length:3d}  loss {loss.item():.3f}  "
                f"found {100 * right:3.0f} %  {rate:.0f} tokens/s of CPU time",
                flush=True,
            )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, facts: dict) -> None:
    """Write the folder under a temporary name and rename it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "model.safetensors").chmod(0o644)  # written for its owner alone, which a wheel would keep
    (partial / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    partial.rename(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not exist yet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=600, help="steps of the first training")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.output.exists():
        parser.error(f"{args.output} exists already; choose a new folder")
    if args.steps < 1:
        parser.error(f"--steps {args.steps} must be positive")
    if (reason := words_unavailable()) is not None:
        parser.error(reason)

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    corpus, words = [document.text for document in embedded_documents("train")], key_words()
    tokenizer = train_tokenizer(corpus, words, args.seed)
    model = build_model(len(tokenizer))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters} parameters", flush=True)
    started = time.monotonic()
    train(model, RowMaker(tokenizer, words, corpus, args.seed), args.steps)
    last = RowMaker(tokenizer, words, corpus, args.seed + 1)
    train(model, last, math.ceil(args.steps * LAST_STEPS_SHARE), LAST_STAGES, LAST_RATE_SHARE)
    minutes = (time.monotonic() - started) / 60
    facts = {
        "seed": args.seed,
        "steps": args.steps,
        "batch_tokens": BATCH_TOKENS,
        "context": CONTEXT,
        "parameters": parameters,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    save(model, tokenizer, args.output, facts)
    print(f"{args.output}: {args.steps} steps in {minutes:.1f} minutes")


if __name__ == "__main__":
    main()
