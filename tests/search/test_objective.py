"""The objective on a model: against plain transformers and by hand, alone and in batches, and no trace left behind."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers

from ropewalk.attention.layout import IGNORED, PackedLayout, Row
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.models.load import attach, load_model
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import Default, LongRope
from ropewalk.search import Candidate, Forwards, Job, ModelEvaluator, ShortPenalty, goal_of
from tests.marks import slow_after
from tests.search.search_rank_cases import FAMILIES, TARGET, TRAINED, tiny_goal, tiny_model, tiny_rows

UNIT = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.bfloat16)}
ROUNDINGS = {torch.float32: 100 * UNIT[torch.float32], torch.bfloat16: UNIT[torch.bfloat16] / 5}
"""Of a mean loss: the roundings of 32 to 64 terms of a product and of a few layers; in bfloat16, whose products are
summed in float32, half a unit of each logit at the end: of the mean over 95 tokens a twentieth, and four such."""


def attached(family="llama", dtype=torch.float32):
    model = tiny_model(family)
    attach(model)
    # Only then: the stock module would round its frequencies, and be refused.
    return model.to(dtype)


def rotary_dim(model):
    return rotary_module(model)[2].methods[None].rotary_dim


def candidates_of(pairs, tokens=(0, 4)):
    random = torch.Generator().manual_seed(pairs)
    found = []
    for number in range(4):
        steps = torch.randint(0, 200, (pairs,), generator=random).sort().values
        factors = tuple(round(1 + int(step) / 100, 2) for step in steps)
        found.append(Candidate(factors, tokens[number % len(tokens)]))
    return found


def jobs_of(candidates, documents):
    return [Job(candidate, document) for document in range(documents) for candidate in candidates]


CHUNKS = (None, 7, TARGET)
BATCHED = [
    *((family, chunk, torch.float32) for family in FAMILIES for chunk in CHUNKS),
    # Chunks are cut by lengths alone: in bfloat16 each family has one of them, and each chunk some families.
    *((family, CHUNKS[number % 3], torch.bfloat16) for number, family in enumerate(FAMILIES)),
]


@pytest.mark.parametrize(
    ("family", "chunk", "dtype"), slow_after(6, BATCHED), ids=["-".join(map(str, case)) for case in BATCHED]
)
def test_a_batch_of_candidates_is_as_one_by_one(family, chunk, dtype):
    model = attached(family, dtype)
    goal = tiny_goal(rotary_dim(model))
    rows = tiny_rows(2, TARGET)
    jobs = jobs_of(candidates_of(goal.current.rotary_dim // 2), 2)
    single = dict(ModelEvaluator(model, goal, rows, forwards=Forwards(prefill_chunk=chunk)).losses(jobs))
    assert list(single) == jobs
    for batch in (3, 8):
        together = ModelEvaluator(model, goal, rows, forwards=Forwards(batch, chunk))
        found = dict(together.losses(jobs))
        assert list(found) == jobs
        for job, loss in single.items():
            # Products of other shapes are summed in another order; nothing else may differ.
            assert found[job] == pytest.approx(loss, rel=ROUNDINGS[dtype])
    # Candidates differ by more, or the test would say nothing.
    of_first = [single[job] for job in jobs[:4]]
    assert max(of_first) / min(of_first) - 1 > ROUNDINGS[dtype] * (100 if dtype == torch.float32 else 1)


def test_methods_of_different_kinds_in_one_pass_are_as_each_alone():
    model = attached()
    goal = tiny_goal()
    evaluator = ModelEvaluator(model, goal, tiny_rows(1, TARGET))
    methods = [goal.current, *goal.baselines().values(), goal.method(candidates_of(4)[1])]
    together = evaluator._losses(methods, 0)
    alone = [evaluator._losses([method], 0)[0] for method in methods]
    assert together == pytest.approx(alone, rel=ROUNDINGS[torch.float32])
    assert len({round(loss, 5) for loss in alone}) == len(methods)
    assert evaluator.baseline(methods[1]) == alone[1]


def plain_loss(model, row):
    """Mean loss of a row in plain transformers, by its own logits."""
    with torch.no_grad():
        logits = model(row.input_ids[None], use_cache=False).logits[0].double()
    return float(F.cross_entropy(logits, row.labels, ignore_index=IGNORED))


@pytest.mark.parametrize("length", [TRAINED - 12, TRAINED, TRAINED + 1, TARGET])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_candidates_loss_is_that_of_the_config_in_plain_transformers(family, length):
    model = attached(family, torch.float64)
    goal = tiny_goal(rotary_dim(model))
    candidate = candidates_of(goal.current.rotary_dim // 2, (0,))[2]
    row = tiny_rows(1, length)[0]
    stock = tiny_model(family, torch.float64)
    parameters = {
        **stock.config.to_dict()["rope_parameters"],
        "rope_type": "longrope",
        "short_factor": list(candidate.rescale_factors),
        "long_factor": list(candidate.rescale_factors),
        "original_max_position_embeddings": TRAINED,
        # s: from it transformers has the attention factor √(1 + ln s / ln T) by itself.
        "factor": TARGET / TRAINED,
    }
    theirs = tiny_model(family, torch.float64, rope_parameters=parameters, max_position_embeddings=TARGET)
    theirs.load_state_dict(stock.state_dict())
    ((_, loss),) = ModelEvaluator(model, goal, [row]).losses([Job(candidate, 0)])
    expected = plain_loss(theirs, row)
    # transformers rounds angles of up to 96 rad to float32, by 96 · 2^-24 = 6e-6.
    assert loss == pytest.approx(expected, rel=TARGET * 2**-24)
    assert abs(plain_loss(stock, row) / expected - 1) > 10 * TARGET * 2**-24


def test_stories260k_at_2048_is_as_in_plain_transformers(stories260k):
    factors = (1.0, 1.83, 2.61, 4.2)
    model = load_model(stories260k)
    goal = goal_of(Default(8, 10000.0), 512, 2048)
    ids = torch.randint(3, 512, (700,), generator=torch.Generator().manual_seed(0))
    labels = torch.cat([ids[1:], torch.tensor([IGNORED])])
    row = Row(ids, labels, PackedLayout.from_lengths([700], "full", 0))
    ((_, loss),) = ModelEvaluator(model, goal, [row], forwards=Forwards(2, 256)).losses(
        [Job(Candidate(factors), 0)]
    )
    config = transformers.AutoConfig.from_pretrained(stories260k)
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": list(factors),
        "attention_factor": goal.attention_factor,
        "original_max_position_embeddings": 512,
    }
    config.max_position_embeddings = 2048
    theirs = transformers.AutoModelForCausalLM.from_pretrained(stories260k, config=config).eval()
    # Float32 throughout: a hundred roundings of the logits, and angles of up to 700 rad in transformers.
    assert loss == pytest.approx(plain_loss(theirs, row), rel=ROUNDINGS[torch.float32] + 700 * 2**-24)


def test_the_objective_is_weighted_by_tokens():
    rows = tiny_rows(2, TARGET)
    rows[1].labels[: TARGET // 2] = IGNORED
    evaluator = ModelEvaluator(attached(), tiny_goal(), rows)
    assert evaluator.targets == [TARGET - 1, TARGET // 2 - 1]
    job = candidates_of(4)[0]
    losses = [loss for _, loss in evaluator.losses(jobs_of([job], 2))]
    expected = (95 * losses[0] + 47 * losses[1]) / 142
    assert evaluator.objective(losses) == pytest.approx(expected, rel=1e-15)
    assert evaluator.objective(losses[:1]) == losses[0]


def test_only_labelled_tokens_count():
    rows = tiny_rows(1, TARGET)
    evaluator = ModelEvaluator(attached(), tiny_goal(), rows)
    candidate = candidates_of(4)[1]
    ((_, whole),) = evaluator.losses([Job(candidate, 0)])
    parts = []
    for start, stop in ((0, 60), (60, TARGET - 1)):
        row = Row(rows[0].input_ids, torch.full_like(rows[0].labels, IGNORED), rows[0].layout)
        row.labels[start:stop] = rows[0].labels[start:stop]
        ((_, loss),) = ModelEvaluator(evaluator.model, tiny_goal(), [row]).losses([Job(candidate, 0)])
        parts.append(loss * (stop - start))
    assert sum(parts) / 95 == pytest.approx(whole, rel=ROUNDINGS[torch.float32])


def test_the_penalty_by_hand_and_the_order_of_documents():
    model = attached()
    goal = tiny_goal()
    long, short = tiny_rows(3, TARGET), tiny_rows(2, TRAINED, 2)
    short[1].labels[:10] = IGNORED
    evaluator = ModelEvaluator(model, goal, long, ShortPenalty(short, 0.5))
    # Long ones first of equals, and in every beginning the two kinds by their shares.
    assert evaluator.is_short == [False, True, False, True, False]
    assert evaluator.rows == [long[0], short[0], long[1], short[1], long[2]]
    every = [[loss for _, loss in evaluator.losses(jobs_of([one], 5))] for one in candidates_of(4)]
    losses = max(every, key=lambda each: each[1])
    plain = tiny_model()
    own = [plain_loss(plain, row) for row in short]
    of_short = (31 * losses[1] + 21 * losses[3]) / 52
    of_own = (31 * own[0] + 21 * own[1]) / 52
    assert of_short > of_own
    expected = (losses[0] + losses[2] + losses[4]) / 3 + 0.5 * (of_short - of_own)
    # The reference is ours in the one, and transformers' in the other.
    assert evaluator.objective(losses) == pytest.approx(expected, rel=ROUNDINGS[torch.float32])
    assert evaluator.objective(losses[:2]) == pytest.approx(
        losses[0] + 0.5 * max(0, losses[1] - own[0]), rel=ROUNDINGS[torch.float32]
    )
    assert evaluator.objective(losses[:1]) == losses[0]


def test_the_original_has_no_penalty_and_a_better_one_no_reward():
    goal = goal_of(Default(8, 10000.0), TRAINED, TARGET, attention_factor=1.0)
    evaluator = ModelEvaluator(
        attached(), goal, tiny_rows(1, TARGET), ShortPenalty(tiny_rows(1, TRAINED, 1), 3.0)
    )
    losses = [loss for _, loss in evaluator.losses(jobs_of([Candidate((1.0,) * 4)], 2))]
    assert losses[1] == evaluator.reference[1]
    assert evaluator.objective(losses) == losses[0]
    assert evaluator.objective([losses[0], losses[1] - 1]) == losses[0]
    assert evaluator.objective([losses[0], losses[1] + 1]) == pytest.approx(losses[0] + 3)
    assert evaluator.baseline(goal.current) == losses[0]


def test_the_reference_of_a_longrope_checkpoint_has_its_short_factors():
    current = LongRope(8, 10000.0, (1.0, 1.1, 1.2, 1.3), (1.0, 2.0, 3.0, 4.0), 1.1, TRAINED)
    goal = goal_of(current, TARGET, 2 * TARGET)
    evaluator = ModelEvaluator(
        attached(), goal, tiny_rows(1, 2 * TARGET), ShortPenalty(tiny_rows(1, TRAINED, 1), 1.0)
    )
    same = LongRope(8, 10000.0, current.short_factor, current.short_factor, 1.1, TRAINED)
    assert evaluator.reference == {1: evaluator._losses([same], 1)[0]}


def test_chunks_have_the_factors_of_the_whole_length():
    current = LongRope(8, 10000.0, (1.0,) * 4, (1.0, 2.0, 3.0, 4.0), 1.1, TRAINED)
    goal = goal_of(current, TARGET, 2 * TARGET)
    penalty = ShortPenalty(tiny_rows(1, TARGET, 1))
    whole, chunks = (
        ModelEvaluator(
            attached(), goal, tiny_rows(1, 2 * TARGET), penalty, forwards=Forwards(prefill_chunk=chunk)
        )
        for chunk in (None, TRAINED // 2)
    )
    # The first chunks alone are short: with short factors there, their keys would not fit the last queries.
    assert chunks.reference[1] == pytest.approx(whole.reference[1], rel=ROUNDINGS[torch.float32])


def test_losses_that_are_no_numbers_are_infinite_and_leave_their_neighbours_alone():
    model = attached()
    goal = tiny_goal()
    evaluator = ModelEvaluator(model, goal, tiny_rows(1, TARGET), forwards=Forwards(3))
    jobs = jobs_of(candidates_of(4)[:3], 1)
    right = dict(evaluator.losses(jobs))

    def spoil(module, arguments, output):
        hidden = output.last_hidden_state.clone()
        hidden[1, 40] = math.nan
        output.last_hidden_state = hidden
        return output

    handle = model.base_model.register_forward_hook(spoil)
    found = dict(evaluator.losses(jobs))
    handle.remove()
    assert found[jobs[1]] == math.inf
    assert [found[jobs[0]], found[jobs[2]]] == [right[jobs[0]], right[jobs[2]]]
    assert evaluator.objective([math.inf]) == math.inf


def with_broken_reference():
    class Broken(ModelEvaluator):
        def _losses(self, methods, document):
            return [math.inf] * len(methods)

    Broken(attached(), tiny_goal(), tiny_rows(1, TARGET), ShortPenalty(tiny_rows(1, TRAINED)))


def test_infinite_losses_of_a_penalty_are_an_infinite_objective():
    evaluator = ModelEvaluator(
        attached(), tiny_goal(), tiny_rows(1, TARGET), ShortPenalty(tiny_rows(1, TRAINED), 0.1)
    )
    assert evaluator.objective([2.0, math.inf]) == math.inf
    assert evaluator.objective([math.inf, 2.0]) == math.inf
    with pytest.raises(
        RunFailure, match="own RoPE, the loss of a row of the short penalty is NaN or infinite"
    ):
        with_broken_reference()


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training):
    model = attached().train(training)
    before = copy.deepcopy(model.state_dict())
    own = rotary_module(model)[2]
    evaluator = ModelEvaluator(
        model, tiny_goal(), tiny_rows(1, TARGET), ShortPenalty(tiny_rows(1, TRAINED)), forwards=Forwards(2)
    )
    list(evaluator.losses(jobs_of(candidates_of(4), 2)))

    def fail(*_):
        raise KeyError("a defect")

    handle = model.base_model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="a defect"):
        list(evaluator.losses(jobs_of(candidates_of(4), 1)))
    handle.remove()
    assert rotary_module(model)[2] is own
    assert (own.total_length, own.training, model.training) == (None, training, training)
    assert all(module.training == training for module in model.modules())
    assert torch.is_grad_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_memory_that_gives_out_is_a_failure_that_says_what_to_do():
    model = attached()
    evaluator = ModelEvaluator(model, tiny_goal(), tiny_rows(1, TARGET), forwards=Forwards(3))

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    model.base_model.register_forward_pre_hook(full)
    with pytest.raises(
        RunFailure, match="on cpu in a forward pass of 3 candidates with 96 tokens each; lower batch"
    ):
        list(evaluator.losses(jobs_of(candidates_of(4), 1)))


def test_what_cannot_be_measured_is_refused():
    model, goal, rows = attached(), tiny_goal(), tiny_rows(1, TARGET)
    with pytest.raises(RopewalkError, match="batch must be 1 or more candidates per forward pass, got 0"):
        ModelEvaluator(model, goal, rows, forwards=Forwards(0))
    with pytest.raises(RopewalkError, match="at least one row"):
        ModelEvaluator(model, goal, [])
    with pytest.raises(RopewalkError, match="prefill_chunk must be 1 token or more, got 0"):
        ModelEvaluator(model, goal, rows, forwards=Forwards(prefill_chunk=0))
    with pytest.raises(
        RopewalkError,
        match=r"the short penalty must not be longer than the trained length of 32 tokens, got a row of 96",
    ):
        ModelEvaluator(model, goal, rows, ShortPenalty(rows))
    for weight in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(RopewalkError, match=f"must be a finite number above 0, got {weight}"):
            ShortPenalty(rows, weight)
    anchored = Row(rows[0].input_ids, rows[0].labels, PackedLayout.from_lengths([TARGET - 1], "anchor", 1))
    with pytest.raises(RopewalkError, match="rows with the pattern 'full', got 'anchor'"):
        ModelEvaluator(model, goal, [anchored])
    empty = Row(rows[0].input_ids, torch.full_like(rows[0].labels, IGNORED), rows[0].layout)
    with pytest.raises(RopewalkError, match="needs at least one labelled token"):
        ModelEvaluator(model, goal, [empty])
    with pytest.raises(RopewalkError, match=r"transformers' own .*load the model with exact_rope=True"):
        list(ModelEvaluator(tiny_model(), goal, rows).losses([Job(candidates_of(4)[0], 0)]))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches_on_cuda_agree_within_rounding(dtype):
    model = attached(dtype=dtype).cuda()
    rows = tiny_rows(2, TARGET)
    jobs = jobs_of(candidates_of(4) * 2, 2)
    single = [loss for _, loss in ModelEvaluator(model, tiny_goal(), rows).losses(jobs)]
    for batch in (2, 4, 8):
        found = [
            loss
            for _, loss in ModelEvaluator(model, tiny_goal(), rows, forwards=Forwards(batch)).losses(jobs)
        ]
        assert found == pytest.approx(single, rel=ROUNDINGS[dtype])
