"""What ranks run in the tests of the search, and these tests' tiny models; spawned processes import it by name."""

from pathlib import Path
from typing import Any

import torch
import transformers

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.models.load import attach
from ropewalk.parallel import World, joined
from ropewalk.rope import Default
from ropewalk.runs import Log
from ropewalk.search import (
    START_TOKENS,
    Candidate,
    Forwards,
    Ledger,
    ModelEvaluator,
    ShortPenalty,
    Space,
    Strategy,
    algorithm_named,
    goal_of,
    minimise,
)
from ropewalk.search.loop import lines_of
from tests.search.toy_objective import ToyEvaluator

TRAINED, TARGET = 32, 96
CONFIG: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TRAINED,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 64, "logit_scale": 0.25}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "glm4": ("Glm4Config", {"head_dim": 8, "partial_rotary_factor": 0.5}),
}
"""Plain, interleaved, partial, and both."""


def tiny_model(family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """A random model of which attention counts: weights that are larger than at the usual start."""
    name, extra = FAMILIES[family]
    told = getattr(transformers, name)(**{**CONFIG, **extra, **config})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(told, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6)
    return model.to(dtype).eval()


def tiny_rows(count: int, length: int, seed: int = 0) -> list[Row]:
    """Rows of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    layout = PackedLayout.from_lengths([length], "full", 0)
    rows = []
    for _ in range(count):
        ids = torch.randint(3, CONFIG["vocab_size"], (length,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return rows


def tiny_goal(rotary_dim: int = 8):
    return goal_of(Default(rotary_dim, 10000.0), TRAINED, TARGET)


def model_search(algorithm: str, world: World | None, batch: int, racing: bool, log: str):
    """A search on a tiny model with everything that there is: n̂, a penalty, racing."""
    model = tiny_model()
    attach(model)
    goal = tiny_goal()
    penalty = ShortPenalty(tiny_rows(2, TRAINED, 1), 0.5)
    evaluator = ModelEvaluator(
        model, goal, tiny_rows(3, TARGET), penalty, Forwards(batch, None, world or World())
    )
    space = goal.space((0, 4, 8))
    calls = []
    leads = world is None or world.is_rank_0
    ledger = Ledger(log=Log(Path(log), lines_of())) if leads else Ledger()
    strategy = Strategy(algorithm_named(algorithm), 70, 5, racing)
    result = minimise(space, evaluator, strategy, goal.seeds(space), ledger, lambda *call: calls.append(call))
    baselines = {name: evaluator.baseline(method) for name, method in goal.baselines().items()}
    return result, baselines, calls


def shared_search(algorithm: str, batch: int, racing: bool, folder: str):
    """The same by all ranks; the first writes a log."""
    torch.set_num_threads(1)
    with joined("cpu") as world:
        return model_search(algorithm, world, batch, racing, f"{folder}/{algorithm}{batch}{racing}.jsonl")


def toy_search(algorithm: str, racing: bool):
    """On an objective that needs no model."""
    space = Space(4, 5.0, START_TOKENS)
    seeds = {"pi": Candidate((4.0,) * 4), "ntk": Candidate((1.0, 1.59, 2.52, 4.0))}
    optimum = Candidate((1.0, 1.5, 2.25, 3.0), 8)
    strategy = Strategy(algorithm_named(algorithm), 300, 7, racing)
    return minimise(space, ToyEvaluator(optimum), strategy, seeds)


def shared_toy_search(algorithm: str, racing: bool):
    with joined("cpu"):
        return toy_search(algorithm, racing)


class FailingEvaluator(ModelEvaluator):
    """One whose rank 1 cannot go on in the second round."""

    rounds = 0

    def _losses(self, methods, document):
        self.rounds += 1
        if self.forwards.world.rank == 1 and self.rounds == 2:
            raise RunFailure("the memory gave out")
        return super()._losses(methods, document)


def failing_search():
    """(kind, message, failed, forwards) of what leaves a search of which one rank fails."""
    with joined("cpu") as world:
        model = tiny_model()
        attach(model)
        goal = tiny_goal()
        evaluator = FailingEvaluator(model, goal, tiny_rows(3, TARGET), forwards=Forwards(world=world))
        ledger = Ledger()
        space = goal.space()
        try:
            strategy = Strategy(algorithm_named("evolution"), 70)
            minimise(space, evaluator, strategy, goal.seeds(space), ledger)
        except RopewalkError as error:
            return type(error).__name__, str(error), error.status, ledger.forwards
    return None


class StrangeEvaluator(ModelEvaluator):
    """One whose rank 1 computes other numbers than rank 0 does: other hardware, say."""

    def _losses(self, methods, document):
        return [loss + self.forwards.world.rank / 7 for loss in super()._losses(methods, document)]


def strange_search():
    """What each rank found, and the penalty's reference."""
    with joined("cpu") as world:
        model = tiny_model()
        attach(model)
        goal = tiny_goal()
        penalty = ShortPenalty(tiny_rows(2, TRAINED, 1), 0.5)
        evaluator = StrangeEvaluator(
            model, goal, tiny_rows(3, TARGET), penalty, forwards=Forwards(world=world)
        )
        space = goal.space()
        result = minimise(space, evaluator, Strategy(algorithm_named("evolution"), 100), goal.seeds(space))
        baselines = {name: evaluator.baseline(method) for name, method in goal.baselines().items()}
        return result, evaluator.reference, baselines
