"""Train a small Llama that retrieves within 512 tokens and not beyond, to show long-context scores on a CPU.

    OMP_NUM_THREADS=1 python scripts/train_retrieval_model.py --output retrieval-model --seed 1 --steps 1600
    ropewalk eval retrieval-model --suite passkey,needle,longeval,ruler --beyond-config \
        --tasks forced,niah_single_1,niah_multikey_2 --lengths 512,1k,2k --depths 5

With seed 1 and 1600 steps (24 minutes on one busy core of a two-core machine) it finds what is hidden in noise
within 512 tokens, and less and less of it beyond, first of all at the beginning of the text: 95, 80 and 35 % of
passkeys at 512, 1024 and 2048 tokens, 100, 72 and 26 % of the needle grid, 100, 90 and 35 % of niah_single_1. It
finds 30 % of niah_multikey_2, where eleven or so keys are alike, and none of LongEval's lines (asked, in training and
then, without the beginning of the answer): it copies a number that it has found, and seldom finds one by its key alone.

The tokenizer is a byte-level BPE over the benchmarks' own prompts, with digits that stand alone: a line of noise
takes 25 tokens, so that a RULER prompt with 128 tokens of room for its answer fits into 512. The model is trained
on answers alone, in stages whose rows grow longer:

- copying: random strings of tokens, repeated;
- recall: random keys with digits, asked for again in another order, many of them in a row;
- exams: the benchmarks' prompts with new keys and numbers, some with several questions, some without the
  instructions.

Three things make that a matter of minutes. The first layer's heads begin as heads that look one to eight
tokens back, each by its rotation alone. The matrices are trained by Muon. And the drills come first.

The seed fixes data and initial weights; the result is the same up to floating-point noise on the same versions.
With --minutes the stages follow the clock in place of the steps, and nothing is the same.
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
from retrieval_rows import BOS_ID, EOS_ID, ExamWriter, RowMaker, Stage, batch_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropewalk.evaluation.tasks.words import words_unavailable

CONTEXT = 512
VOCAB_SIZE = 2048
HIDDEN_SIZE, LAYERS, HEADS, HEAD_DIM = 128, 3, 8, 32
ROPE_THETA = 10_000.0
EMBEDDING_STD = 0.08
LOOK_BACK_SHARPNESS = 3.0
BATCH_TOKENS = 4096
MATRIX_RATE, OTHER_RATE = 0.01, 0.003
WARMUP_STEPS = 60
FINAL_RATE_SHARE = 0.03
EVALUATION_SEED = 1_000_003
"""Of the samples that are asked at the end; no training seed may be this one."""

BOS, EOS = "<s>", "</s>"


STAGES = (
    Stage(0.12, 64, 1.0, 0.0),
    Stage(0.20, 128, 0.1, 0.9),
    Stage(0.35, 256, 0.0, 0.4),
    Stage(1.00, CONTEXT, 0.0, 0.1),
)


def train_tokenizer(seed: int, texts: int = 1500) -> PreTrainedTokenizerFast:
    """A byte-level BPE over exams, whose digits stand alone, so that a number can be copied digit by digit."""
    writer = ExamWriter(random.Random(f"tokenizer {seed}"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ("".join(text for text, _ in writer.any(CONTEXT)(12).pieces()) for _ in range(texts)),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
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
        look_back(model.model.layers[0].self_attn, shared / shared.norm())
    return model


def look_back(attention: torch.nn.Module, shared: torch.Tensor) -> None:
    """Make head h attend h + 1 tokens back.

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
    for head in range(HEADS):
        angles = (head + 1) * inv_freq
        queries[head, 0] += scale * shared
        keys[head, 0] += scale * angles.cos()[:, None] * shared
        keys[head, 1] += scale * angles.sin()[:, None] * shared


def answer_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Weighted mean loss in nats over the tokens that count, and the share of them that are the likeliest."""
    counts = weights[:, 1:] > 0
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    logits, targets = model.lm_head(hidden[counts]), ids[:, 1:][counts]
    right = (logits.argmax(-1) == targets).float().mean().item()
    shares = weights[:, 1:][counts] / weights[:, 1:].sum()
    return shares @ F.cross_entropy(logits, targets, reduction="none"), right


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


def stage_at(done: float) -> Stage:
    """The stage of a share of the training."""
    return next(stage for stage in STAGES if done < stage.until or stage is STAGES[-1])


def train(model: LlamaForCausalLM, maker: RowMaker, steps: int, minutes: float | None) -> int:
    """Train until the steps or the minutes are over; returns the steps."""
    optimizers = optimizers_of(model)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    started = time.monotonic()
    step = tokens = 0
    while (done := (time.monotonic() - started) / (60 * minutes) if minutes else step / steps) < 1:
        stage = stage_at(done)
        ids, weights = batch_of([maker.row(stage) for _ in range(BATCH_TOKENS // stage.length)])
        loss, right = answer_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group, peak in peaks:
            group["lr"] = peak * rate_share(step, done)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step, tokens = step + 1, tokens + ids.numel()
        if step % 50 == 0:
            rate = tokens / (time.monotonic() - started)
            print(
                f"step {step:5d}  rows of {stage.length:3d}  loss {loss.item():.3f}  "
                f"right {100 * right:3.0f} %  {rate:.0f} tokens/s",
                flush=True,
            )
    return step


def quick_check(folder: Path, samples: int) -> None:
    """Print the scores of the saved folder, at the context and at twice and four times its length."""
    from ropewalk.evaluation import evaluate_model
    from ropewalk.evaluation.model_under_test import ModelUnderTest
    from ropewalk.evaluation.settings import Settings
    from ropewalk.models.load import load_model

    settings = Settings(
        suites=("passkey", "longeval", "ruler"),
        lengths=(CONTEXT, 2 * CONTEXT, 4 * CONTEXT),
        tasks=("niah_single_1", "niah_multikey_2"),
        samples=samples,
        seed=EVALUATION_SEED,
        beyond_config=True,
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    results = evaluate_model(ModelUnderTest.in_memory(load_model(folder), tokenizer), settings)
    for result in results:
        if result.length is not None and result.status == "ok":
            low, high = result.ci95
            print(
                f"{result.task:16s} {result.length:5d} tokens  {result.score:5.1f} %  [{low:.0f}, {high:.0f}]"
            )


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, facts: dict) -> None:
    """Write the folder under a temporary name and rename it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "training.json").write_text(json.dumps(facts, indent=2) + "\n")
    partial.rename(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder to write; must not exist yet")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--minutes", type=float, help="train so long in place of a number of steps")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--samples", type=int, default=50, help="prompts of each quick check; 0 for none")
    args = parser.parse_args(arguments)
    if args.output.exists():
        parser.error(f"{args.output} exists already; choose a new folder")
    if args.steps < 1 or (args.minutes is not None and args.minutes <= 0):
        parser.error("--steps and --minutes must be positive")
    if args.seed == EVALUATION_SEED:
        parser.error(f"--seed {args.seed} is that of the evaluation; choose another")
    if (reason := words_unavailable()) is not None:
        parser.error(reason)

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed)
    model = build_model(len(tokenizer))
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    started = time.monotonic()
    steps = train(model, RowMaker(tokenizer, args.seed), args.steps, args.minutes)
    minutes = (time.monotonic() - started) / 60
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    facts = {"seed": args.seed, "steps": steps, "context": CONTEXT, "minutes": round(minutes, 1), **versions}
    save(model, tokenizer, args.output, {**facts, "transformers": transformers.__version__})
    print(f"{args.output}: {steps} steps in {minutes:.1f} minutes")
    if args.samples:
        quick_check(args.output, args.samples)


if __name__ == "__main__":
    main()
