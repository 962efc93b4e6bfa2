"""The steps of ``python -m benchmarks.gpu``: ropewalk's and others', and their memory beside the plan.

Ours are those of a recipe, built as ``ropewalk extend`` builds them, but for random weights and tokens. Beside them
stand a plain loop of transformers with SDPA and torch's AdamW, and TRL's ``SFTTrainer`` and torchtitan 0.3 where they
are installed. All see rows of the same length; our documents have new lengths in every row. ``seconds`` is the median
of the steps behind the first. ``of_matmul_rate`` holds the needed operations (six a weight and token, and those of the
visible pairs; nothing computed again) against the measured rate of a large matrix product.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import transformers
import yaml

from benchmarks.gpu_attention import Shape, fastest_engine
from benchmarks.gpu_sizes import Case, NotRunError, Sizes, allocated_gib, finish, matmul_rate, peak_gib
from ropewalk import PackedLayout, Row
from ropewalk.attention.choices import Pattern
from ropewalk.attention.flash import Flash, flash_activated
from ropewalk.attention.layout import next_token_labels
from ropewalk.dry_run import HardwareSettings, plan
from ropewalk.dry_run.run import plan_here
from ropewalk.models.attention.hooks import localities_of
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import ModelSetup, checkpoint_activations, choose_device, empty_model
from ropewalk.models.sharding import materialise
from ropewalk.planning.sizing.time import GPUS, gpu_named
from ropewalk.training.preflight import Machine, device_bytes, resolve
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import ResolvedRecipe
from ropewalk.training.simulation.rank_costs import play, played_by
from ropewalk.training.stage import ready_to_train
from ropewalk.training.stage_engine import measures_engine
from ropewalk.training.update.step import ForwardPass, micro_batches, prepare, train_step

RATE = 1e-4
STEPS = 3
"""Steps that the median is taken of, at most."""


@dataclass(frozen=True)
class Trained:
    """A model that trains on one row a step.

    Attributes:
        name, shape: of the model, as in ``Sizes.models``.
        length: tokens of a row.
        mean: mean length of its documents.
        pattern: attention pattern.
        settings: further keys of the recipe's stage.
    """

    name: str
    shape: Mapping[str, Any]
    length: int
    mean: int
    pattern: Pattern = "anchor"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> transformers.LlamaConfig:
        # Half of the row, because a recipe extends the context.
        made = {"max_position_embeddings": self.length // 2, "architectures": ["LlamaForCausalLM"]}
        return transformers.LlamaConfig(**self.shape, **made)

    @property
    def attention(self) -> Shape:
        config, average = self.config, None if self.pattern == "full" else self.mean
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        return Shape(self.length, self.pattern, average, *heads)

    def rows(self) -> Iterator[tuple[PackedLayout, Row]]:
        """Rows without end, of random tokens."""
        generator, seed = torch.Generator().manual_seed(0), 0
        while True:
            layout = self.attention.layout(seed)
            ids = torch.randint(0, self.shape["vocab_size"], (self.length,), generator=generator)
            yield layout, Row(ids, next_token_labels(ids, layout), layout)
            seed += 1

    def recipe(self, folder: Path) -> Recipe:
        """Its recipe, for the config alone, which is written into the folder."""
        self.config.save_pretrained(folder)
        stage = {
            "context": self.length,
            "steps": 1,
            "rows_per_step": 1,
            "learning_rate": RATE,
            "pattern": self.pattern,
            "rope": {"method": "ntk"},
            **self.settings,
        }
        recipe = {
            "model": str(folder),
            "output": str(folder / "run"),
            "precision": "bfloat16",
            "data": {"sources": [{"path": "embedded"}]},
            "parallel": {},
            "stages": [stage],
        }
        return parse_recipe(yaml.safe_dump(recipe), "recipe.yaml")

    def row(self, way: str) -> dict[str, Any]:
        """What names it among the figures."""
        named = {"model": self.name, "length": self.length, "pattern": self.pattern, "way": way}
        return {**named, **self.settings}


def steps(sizes: Sizes, device: str) -> list[Case]:
    """The steps, those first that the rest is compared with."""
    (first, *others), (short, *longer) = sizes.models, sizes.steps
    kept, again = {"gradient_checkpointing": False}, {"gradient_checkpointing": True}

    def trained(name: str, length: int, pattern: Pattern, settings: Mapping[str, Any]) -> Trained:
        return Trained(name, sizes.models[name], length, sizes.mean_document, pattern, settings)

    ways: dict[str, Callable[..., Mapping[str, Any]]] = {
        "ropewalk": own_step,
        "plain transformers": plain_step,
        "TRL": trl_step,
        "torchtitan": titan_step,
    }
    ours, plain, *theirs = ways
    both: tuple[Pattern, ...] = ("anchor", "full")
    full = trained(first, short, "full", again)
    wanted = [
        (ours, trained(first, short, "anchor", again)),
        (plain, full),
        (ours, full),
        (ours, trained(first, short, "anchor", kept)),
        *((ours, trained(first, length, p, again)) for length in longer for p in both),
        *((ours, trained(name, short, p, again)) for name in others for p in both),
        *((plain, trained(name, short, "full", again)) for name in others),
        *((plain, trained(first, length, "full", again)) for length in longer),
        *((way, trained(first, short, "full", kept)) for way in (ours, plain)),
        (ours, trained(first, short, "intra_document", again)),
        *((ours, trained(first, short, "anchor", again | each)) for each in SWITCHES),
        *((way, full) for way in theirs),
    ]
    return [Case(each.row(way), partial(ways[way], each, sizes, device)) for way, each in wanted]


SWITCHES: tuple[dict[str, Any], ...] = (
    {"offload_activations": True},
    {"tiled_mlp": 8192},
    {"offload_optimizer": True},
    {"compile": False},
    {"keep_attention": False},
)
"""Settings of a stage whose time and memory stand beside those of the same step without them."""


def memory(sizes: Sizes, device: str) -> list[Case]:
    """Steps whose peak stands beside that of ``ropewalk plan`` for the same recipe."""
    name, shape = next(iter(sizes.models.items()))
    short, long = sizes.steps[0], sizes.steps[-1]
    again = {"gradient_checkpointing": True}
    least = {key: value for each in SWITCHES for key, value in each.items() if value is not False}
    wanted: tuple[tuple[int, Pattern, dict[str, Any]], ...] = (
        (long, "anchor", again),
        (long, "anchor", again | least),
        (short, "anchor", {"gradient_checkpointing": False}),
        (short, "full", again),
    )
    steps = [Trained(name, shape, length, sizes.mean_document, p, each) for length, p, each in wanted]
    return [
        Case(each.row("ropewalk"), partial(beside_plan, each, sizes, device))
        for each in (steps[1:2] if sizes.small else steps)
    ]


def own_step(trained: Trained, sizes: Sizes, device: str) -> dict[str, Any]:
    """Steps of the recipe, with nothing compiled before, as in a process of its own."""
    torch.compiler.reset()
    with tempfile.TemporaryDirectory() as folder:
        here = choose_device(device)
        machine = Machine(here, device_bytes(here))
        resolved = resolve(trained.recipe(Path(folder)), machine=machine)
        flash: Flash = "FA2"
        if measures_engine(resolved, 0):
            best = fastest_engine(trained.attention, device).candidate
            resolved, flash = resolved.with_engine(0, best.engine), best.flash
        stage = resolved.stages[0]
        model = random_model(resolved)
    optimizer = ready_to_train(model, stage, stage.precision == "bfloat16")
    forward = ForwardPass(stage.precision, stage.settings.stage.offload_activations)
    localities = localities_of(model.model)
    given = list(islice(trained.rows(), steps_of(sizes) + 1))
    # Plans and pinned memory are made ahead, as training does in a thread.
    ahead = iter([prepare(micro_batches([row]), stage.engine, model.device, localities) for _, row in given])

    def step() -> None:
        train_step(model, next(ahead), optimizer, RATE, forward)

    layouts = [layout for layout, _ in given[1:]]
    with flash_activated(flash):
        found = timed(step, trained, layouts, model, sizes, device)
    return {"engine": stage.engine, "flash": flash, **found}


def random_model(resolved: ResolvedRecipe) -> LossModel:
    """The recipe's model with random weights."""
    setup = ModelSetup(resolved.methods[0], resolved.target, resolved.stages[0].engine)
    model = empty_model(resolved.model, setup)
    trained = LossModel(model, OutputHead.unchecked(model))
    materialise(trained, resolved.device)
    torch.manual_seed(0)
    for parameter in trained.parameters():
        # Norms have ones; no other parameter of a Llama has one dimension.
        torch.nn.init.normal_(parameter, 0, 0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    return trained


def plain_step(trained: Trained, sizes: Sizes, device: str) -> dict[str, Any]:
    """A loop without ropewalk: transformers with SDPA, full attention, and torch's AdamW in bfloat16."""
    model = plain_model(trained, device)
    if trained.settings["gradient_checkpointing"]:
        checkpoint_activations(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    ids = torch.randint(0, trained.shape["vocab_size"], (1, trained.length), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, trained, [trained.attention.layout(0)], model, sizes, device)


def plain_model(trained: Trained, device: str) -> Any:
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(
            trained.config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()


def trl_step(trained: Trained, sizes: Sizes, device: str) -> dict[str, Any]:
    """TRL's ``SFTTrainer`` on rows of one document."""
    try:
        datasets, trl = (import_module(name) for name in ("datasets", "trl"))
    except ImportError as error:
        raise NotRunError(f"TRL is not installed: {error}") from error
    vocabulary = trained.shape["vocab_size"]
    ids = torch.randint(0, vocabulary, (steps_of(sizes) + 1, trained.length)).tolist()
    seconds: list[float] = []

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            finish(torch.device(device))
            if len(seconds) == 1:
                allocated_gib(device)
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            finish(torch.device(device))
            seconds.append(time.perf_counter() - self.began)

    model = plain_model(trained, device)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        # transformers 5.24 has another name for gradient_checkpointing, which 5.17 does not know.
        warnings.simplefilter("ignore", FutureWarning)
        settings = trl.SFTConfig(
            folder,
            max_steps=steps_of(sizes) + 1,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing=trained.settings["gradient_checkpointing"],
            bf16=True,
            max_length=trained.length,
            dataset_kwargs={"skip_prepare_dataset": True},
            use_cpu=device == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = datasets.Dataset.from_dict({"input_ids": ids})
        trainer = trl.SFTTrainer(model, args=settings, train_dataset=data, processing_class=words(vocabulary))
        trainer.add_callback(Clock())
        trainer.train()
    return figures(seconds[1:], trained, [trained.attention.layout(0)], model, sizes, device)


def titan_step(trained: Trained, sizes: Sizes, device: str) -> dict[str, Any]:
    """torchtitan's 1B Llama in a loop: its checkpointing, compiled layers, loss in chunks, and varlen attention."""
    try:
        llama, losses, utils, recomputed, compiled = (
            import_module(f"torchtitan.{name}")
            for name in (
                "models.llama3",
                "components.loss",
                "models.common.config_utils",
                "distributed.activation_checkpoint",
                "distributed.compile",
            )
        )
        config, distributed = (import_module(f"torchtitan.{name}") for name in ("config", "distributed"))
    except ImportError as error:
        raise NotRunError(f"torchtitan is not installed: {error}") from error
    if trained.name not in llama.llama3_configs:
        raise NotRunError(f"torchtitan has no Llama of the shape {trained.name}")
    spec = llama.model_registry(trained.name, attn_backend="varlen")
    with torch.device(device):
        model = spec.model.build()
    model.init_states(buffer_device=torch.device(device))
    # Its buffers are complex, which the module's own cast would lose.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    if trained.settings["gradient_checkpointing"]:
        recomputed.FullAC.Config().build(dump_folder=tempfile.gettempdir()).apply(model)
    alone = distributed.ParallelDims(1, 1, 1, 1, 1, 1, 1)
    compiled.apply_compile(model, compile_config=config.CompileConfig(enable=True), parallel_dims=alone)
    inner = losses.CrossEntropyLoss.Config(global_vocab_size=utils.decoder_vocab_size(spec))
    loss = losses.ChunkedLossWrapper.Config(loss_fn=inner).build()
    model._skip_lm_head = True
    loss.set_lm_head(model.lm_head)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    ids = torch.randint(0, trained.shape["vocab_size"], (1, trained.length), device=device)
    positions = torch.arange(trained.length, device=device)[None]
    masks = model.get_attention_masks(positions=positions)
    targets = torch.tensor(float(trained.length), device=device)

    def step() -> None:
        hidden = model(ids, positions=positions, attention_masks=masks)
        loss(hidden, ids, targets)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed(step, trained, [trained.attention.layout(0)], model, sizes, device)


def words(vocabulary: int) -> Any:
    """A tokenizer of so many words, for trainers that demand one."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({str(each): each for each in range(vocabulary)}, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="1", pad_token="2")


def beside_plan(trained: Trained, sizes: Sizes, device: str) -> dict[str, Any]:
    """Peak memory and seconds of a step, and what ``ropewalk plan`` says of them."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = trained.recipe(Path(folder))
        known = gpu_named(torch.cuda.get_device_name()) if device == "cuda" else None
        # A device that is not simulated needs no process of its own.
        with played_by(play) if device == "cpu" else nullcontext():
            if known is None:
                planned = plan_here(recipe)
            else:
                gpu = next(name for name, each in GPUS.items() if each is known)
                length = trained.length if trained.pattern == "full" else trained.mean
                planned = plan(recipe, HardwareSettings(gpus=1, gpu=gpu, document_length=length))
    (stage,) = planned.stages
    found = own_step(trained, sizes, device)
    found["planned_peak_gib"] = stage.memory.peak / 2**30
    found |= {"planned_seconds": stage.time.seconds} if stage.time is not None else {}
    return found


def steps_of(sizes: Sizes) -> int:
    return min(STEPS, sizes.repeats)


def timed(
    step: Callable[[], Any],
    trained: Trained,
    layouts: list[PackedLayout],
    model: torch.nn.Module,
    sizes: Sizes,
    device: str,
) -> dict[str, Any]:
    """Figures of steps behind the first, which compiles, and makes the optimizer's state."""
    step()
    finish(torch.device(device))
    before = allocated_gib(device)
    seconds = []
    for _ in range(steps_of(sizes)):
        began = time.perf_counter()
        step()
        finish(torch.device(device))
        seconds.append(time.perf_counter() - began)
    return {**figures(seconds, trained, layouts, model, sizes, device), "before_gib": before}


def figures(
    seconds: list[float],
    trained: Trained,
    layouts: list[PackedLayout],
    model: torch.nn.Module,
    sizes: Sizes,
    device: str,
) -> dict[str, Any]:
    config, attention = trained.config, trained.attention
    pairs = config.num_hidden_layers * mean(map(attention.flops, layouts))
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    weights = sum(parameter.numel() for parameter in model.parameters()) - embedding
    needed = 6 * weights * trained.length + pairs
    second = median(seconds)
    return {
        "seconds": second,
        "tokens_per_s": trained.length / second,
        "needed_flops": needed,
        "of_matmul_rate": needed / second / matmul_rate(sizes.product, device, sizes.repeats),
        **peak_gib(device),
    }
