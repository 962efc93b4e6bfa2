"""Racing: what is clearly behind after its first documents is dropped, and nothing that matters."""

import itertools
import math
import statistics

import numpy as np
import pytest

from ropewalk.search import Candidate, Space, Strategy, evolve, minimise
from ropewalk.search.algorithms import Ask, covariance
from ropewalk.search.loop import MARGIN
from tests.search.toy_objective import ToyEvaluator

SPACE = Space(1, 11.0)


def point(number):
    return Candidate((SPACE.value(number),))


class Table:
    """Losses of candidates written down; ``asked`` counts the documents of each."""

    def __init__(self, table):
        self.table, self.asked = table, dict.fromkeys(table, 0)
        self.n_documents = len(next(iter(table.values())))

    def losses(self, jobs):
        for job in jobs:
            self.asked[job.candidate] += 1
            yield job, self.table[job.candidate][job.document]

    def objective(self, losses):
        return statistics.fmean(losses)


def race(rows, first, keep=1, again=True):
    """Documents that each of ``rows`` was measured on; the first ones are seeds, and asked for ``again``."""
    table = Table({point(number): row for number, row in enumerate(rows)})

    def one_ask(space, seeds, random):
        yield Ask(tuple(table.table)[0 if again else first :], keep)

    minimise(SPACE, table, Strategy(one_ask, 10**6), {str(i): point(i) for i in range(first)})
    return list(table.asked.values())


def test_where_documents_agree_only_the_kept_go_on():
    rows = [[1.0 + 0.1 * i + 0.5 * document for document in range(3)] for i in range(10)]
    assert race(rows, first=4) == [3] * 4 + [1] * 6
    assert race(rows[::-1], first=4) == [3] * 4 + [1] * 5 + [3]
    assert race(rows[::-1], first=4, keep=3) == [3] * 4 + [1] * 3 + [3] * 3


def test_what_is_behind_by_less_than_documents_have_erred_goes_on():
    # The four that are complete: the rest of their documents adds 0.0 or 0.2 to the first.
    seeds = [[1.0, 1.0, 1.0], [1.0, 1.2, 1.4], [1.0, 1.0, 1.0], [1.0, 1.2, 1.4]]
    error = statistics.stdev([0.0, 0.2, 0.0, 0.2])
    limit = 1.0 + MARGIN * math.sqrt(2) * error
    inside, outside = [[limit - 1e-9] * 3, [limit + 1e-9] * 3]
    after_one = race([*seeds, inside, outside], first=4)
    assert after_one[5] == 1
    assert after_one[4] > 1


def test_what_is_behind_is_behind_the_last_that_is_kept():
    seeds = [[1.0, 1.0, 1.0], [1.0, 1.2, 1.4], [1.0, 1.0, 1.0], [1.0, 1.2, 1.4]]
    last, near, far = [5.0] * 3, [5.0 + 1e-9] * 3, [9.0] * 3
    assert race([*seeds, last, near, far], first=4, keep=5)[4:] == [3, 3, 1]


def test_with_fewer_than_four_to_learn_from_the_better_half_goes_on():
    rows = [[1.0 + 0.1 * i, 1.0, 1.0] for i in range(8)]
    table = race(rows, first=1)
    # Eight, four of them, and two.
    assert table == [3, 3, 2, 2, 1, 1, 1, 1]


@pytest.mark.parametrize("keep", [1, 2])
def test_infinite_ones_go_on_only_where_nothing_else_is_left_to_keep(keep):
    rows = [[1.0, 1.0, 1.0]] * 4 + [[math.inf] * 3] * 4
    assert race(rows, first=4, keep=keep) == [3] * 4 + [1] * 4


def test_as_many_as_are_kept_go_on_even_if_all_are_infinite():
    rows = [[1.0, 1.0, 1.0]] * 4 + [[math.inf] * 3] * 4
    assert race(rows, first=4, keep=2, again=False) == [3] * 4 + [3] * 2 + [1] * 2


def test_a_document_that_all_find_harder_is_no_error():
    rows = [[1.0 + 0.1 * i, 50.0 + 0.1 * i, 9.0 + 0.1 * i] for i in range(6)]
    assert race(rows, first=4) == [3] * 4 + [1] * 2


@pytest.mark.parametrize("algorithm", [evolve(), covariance()])
def test_racing_saves_forwards_without_losing_much(algorithm):
    space = Space(4, 5.0)
    optimum = Candidate((1.0, 1.5, 2.25, 3.0))
    seeds = {"pi": Candidate((4.0,) * 4), "ntk": Candidate((1.0, 1.59, 2.52, 4.0))}

    def run(seed, racing):
        evaluator = ToyEvaluator(optimum, (1.0, 1.5, 0.5, 0.7, 1.3))
        return minimise(space, evaluator, Strategy(algorithm, 500, seed, racing), seeds)

    saved = []
    for seed in range(3):
        whole, raced = run(seed, False), run(seed, True)
        reached = raced.forwards_to(whole.best.objective + 1e-3)
        saved.append(
            math.inf if reached is None else reached / whole.forwards_to(whole.best.objective + 1e-3)
        )
    assert np.median(saved) < 0.75


def test_the_parents_of_evolution_have_all_documents():
    space = Space(4, 5.0)
    asked = []

    def watched(*arguments):
        inner = evolve()(*arguments)
        ask = next(inner)
        while True:
            measured = yield ask
            asked.append((ask, {each.candidate: each for each in measured}))
            try:
                ask = inner.send(measured)
            except StopIteration:
                return

    evaluator = ToyEvaluator(Candidate((1.0, 1.5, 2.25, 3.0)), (1.0, 1.5, 0.5))
    minimise(space, evaluator, Strategy(watched, 800), {"pi": Candidate((4.0,) * 4)})
    assert len(asked) > 3
    for (_, before), (ask, _) in itertools.pairwise(asked):
        parents = [before[candidate] for candidate in ask.candidates[: ask.keep]]
        complete = sorted(each.objective for each in before.values() if each.documents == 3)
        assert [each.objective for each in parents] == complete[: ask.keep]
