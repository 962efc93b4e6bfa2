"""An objective whose optimum is known: squared distance to hidden factors, a little different on each document."""

from collections.abc import Iterator, Sequence

from ropewalk.search import Candidate, Job


class ToyEvaluator:
    """Loss 1 plus the mean squared distance to ``optimum``, times what the document weighs."""

    def __init__(self, optimum: Candidate, weights: Sequence[float] = (1.0, 1.5, 0.5)) -> None:
        self.optimum, self.weights = optimum, weights
        self.asked: list[Job] = []

    @property
    def n_documents(self) -> int:
        return len(self.weights)

    def losses(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, float]]:
        for job in jobs:
            self.asked.append(job)
            yield job, self.loss(job)

    def loss(self, job: Job) -> float:
        pairs = zip(job.candidate.rescale_factors, self.optimum.rescale_factors, strict=True)
        distance = sum((a - b) ** 2 for a, b in pairs) / len(self.optimum.rescale_factors)
        tokens = abs(job.candidate.start_tokens - self.optimum.start_tokens) / 100
        return 1 + self.weights[job.document] * (distance + tokens)

    def objective(self, losses: Sequence[float]) -> float:
        return sum(losses) / len(losses)
