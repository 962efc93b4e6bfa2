"""A search as a whole: budget, cache, racing, resume, one seed one search."""

import math

import pytest

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.search import Candidate, Job, Ledger, Space, Strategy, evolve, minimise
from ropewalk.search.loop import search_log
from tests.search.search_log_cases import read_log
from tests.search.toy_objective import ToyEvaluator

SPACE = Space(4, 5.0)
OPTIMUM = Candidate((1.0, 1.5, 2.25, 3.0))
SEEDS = {"pi": Candidate((4.0,) * 4), "ntk": Candidate((1.0, 1.59, 2.52, 4.0))}


def run(evaluator=None, **options):
    kept = {name: options.pop(name) for name in ("ledger", "progress") if name in options}
    strategy = Strategy(evolve(), **{"budget": 400, "seed": 3, **options})
    return minimise(SPACE, evaluator or ToyEvaluator(OPTIMUM), strategy, SEEDS, **kept)


def test_one_seed_is_one_search_and_another_seed_another():
    assert run() == run()
    assert run().traces != run(seed=4).traces


def test_no_job_is_evaluated_twice_and_none_beyond_the_budget():
    evaluator = ToyEvaluator(OPTIMUM)
    result = run(evaluator)
    assert len(set(evaluator.asked)) == len(evaluator.asked) == result.forwards == 400
    assert result.spent


@pytest.mark.parametrize("racing", [True, False])
def test_the_result_is_no_worse_than_the_seeds_however_small_the_budget(racing):
    evaluator = ToyEvaluator(OPTIMUM)
    result = run(evaluator, budget=2 * evaluator.n_documents, racing=racing)
    assert result.best.candidate == SEEDS["ntk"]
    assert result.best.documents == evaluator.n_documents


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_a_budget_that_does_not_pay_for_the_seeds_is_refused(budget):
    evaluator = ToyEvaluator(OPTIMUM)
    said = (
        rf"a budget of {budget} forward passes is too small for the 2 initial candidates on 3 documents "
        r"each; either raise budget \(--budget\) to 6 or more"
    )
    with pytest.raises(RopewalkError, match=said):
        run(evaluator, budget=budget)
    assert not evaluator.asked
    run(evaluator, budget=6)


def test_seeds_that_are_the_same_cost_once():
    evaluator = ToyEvaluator(OPTIMUM)
    twice = {"pi": SEEDS["ntk"], "ntk": SEEDS["ntk"]}
    assert minimise(SPACE, evaluator, Strategy(evolve(), 3), twice).best.candidate == SEEDS["ntk"]
    with pytest.raises(RopewalkError, match=r"the 1 initial candidate on 3 .*to 3 or"):
        minimise(SPACE, evaluator, Strategy(evolve(), 2), twice)


def test_losses_that_are_no_numbers_are_a_failure():
    evaluator = ToyEvaluator(OPTIMUM)
    evaluator.loss = lambda job: math.inf
    with pytest.raises(RunFailure, match="the loss of every candidate is NaN or infinite"):
        run(evaluator)


@pytest.mark.parametrize("racing", [True, False])
@pytest.mark.parametrize("after", [1, 7, 150, 399])
def test_a_search_that_was_cut_off_goes_on_to_the_same_result(tmp_path, racing, after):
    whole = run(racing=racing)
    header = {"seed": 3}
    path = tmp_path / "search.jsonl"

    class Killed(BaseException):
        pass

    class Mortal(ToyEvaluator):
        def losses(self, jobs):
            for each in super().losses(jobs):
                if len(self.asked) > after:
                    raise Killed
                yield each

    with search_log(path, header, False) as ledger, pytest.raises(Killed):
        run(Mortal(OPTIMUM), racing=racing, ledger=ledger)
    # A process that is killed while it writes leaves half a line.
    with path.open("a") as file:
        file.write('{"rescale_factors": [1.0, 1.')
    rest = ToyEvaluator(OPTIMUM)
    with search_log(path, header, True) as ledger:
        assert len(ledger.known) == after
        assert run(rest, racing=racing, ledger=ledger) == whole
    assert len(rest.asked) == whole.forwards - after
    assert len(read_log(path, header)) == whole.forwards


def test_a_log_of_another_search_is_refused(tmp_path):
    path = tmp_path / "search.jsonl"
    with search_log(path, {"seed": 3, "text": "a.jsonl"}, False):
        pass
    with pytest.raises(RopewalkError, match=r"with text 'a.jsonl' instead of 'b.jsonl'"):
        read_log(path, {"seed": 3, "text": "b.jsonl"})
    with pytest.raises(RopewalkError, match="already holds a search"), search_log(path, {"seed": 3}, False):
        pass


def test_a_ledger_answers_what_it_knows_and_counts_it_once():
    job = Job(OPTIMUM, 0)
    ledger = Ledger({job: 1.5})
    assert ledger.forwards == 0
    assert ledger.recall(job)
    assert ledger.recall(job)
    assert ledger.forwards == 1
    assert not ledger.recall(Job(OPTIMUM, 1))
