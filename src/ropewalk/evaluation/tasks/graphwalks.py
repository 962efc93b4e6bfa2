"""Graph walks: a long list of directed edges, and a question about one node: who is N steps away, or who points to it.

The task is OpenAI's; ids, graphs and words are our own, because the published ids are predictable (MD5 digests of 0, 1,
2 and so on). Four questions share a graph, so that a server or a cache reads it once.

Source: https://huggingface.co/datasets/openai/graphwalks (MIT).
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import DRAWS, NO_DETAILS, Draft, Form, Sample, grouped_samples, sample_random
from ropewalk.evaluation.tasks.suite import GeneratedSuite

Question = Literal["bfs", "parents"]

QUESTIONS = 4
"""Questions about each graph."""
MOST_NODES = 50
"""Most nodes of an answer; published questions have up to 6,940."""
MOST_STEPS = 4
"""Longest distance that is asked for; with two edges a node, further walks reach more nodes than fit an answer."""
EDGES_A_NODE = 2
FEWEST_EDGES = 24
ID_BITS = 32
"""Of a node's id, which is written with eight hexadecimal digits."""

INTRODUCTION = """\
Below is a directed graph as a list of edges. Each line names a node, an arrow, and the node that the edge leads to. \
After the list comes an operation on the graph. Carry it out, and give the set of nodes that it results in.

A breadth-first search (BFS) from a node with depth N asks for the nodes whose shortest path from that node has \
exactly N edges, and for no nodes that are nearer. The parents of a node are the nodes that have an edge to it.

Three examples for the graph
uvwx -> alke
abcd -> uvwx
abcd -> efgh
efgh -> uvwx

Operation: Find the parents of node uvwx.
Final Answer: [abcd, efgh]

Operation: Perform a BFS from node abcd with depth 1.
Final Answer: [uvwx, efgh]

Operation: Perform a BFS from node abcd with depth 2.
Final Answer: [alke]

The graph has these edges:
"""
CLOSING = """
You may think first. The last line of your answer must have the form
Final Answer: [node, node]
with all nodes of the result in any order, and "Final Answer: []" if there are none.

Operation: """
OPERATIONS: Mapping[Question, str] = {
    "bfs": "Perform a BFS from node {node} with depth {steps}.",
    "parents": "Find the parents of node {node}.",
}
_ANSWER = re.compile(r"Final Answer:\s*\[([^\[\]]*)\]")

Edges = Sequence[tuple[str, str]]


@dataclass(frozen=True)
class GraphWalks:
    """One of the two operations; a unit is an edge.

    Args:
        name: ``bfs`` or ``parents``.
    """

    name: Question

    suite = "graphwalks"
    max_new_tokens = 1024

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"questions_per_graph": QUESTIONS, "edges_per_node": EDGES_A_NODE}

    def unavailable(self) -> str | None:
        """Return None: the task needs no external data."""
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        form = Form(self.suite, self.name, "f1", self.max_new_tokens, least_fill=0.99, draws=DRAWS)
        return grouped_samples(
            form,
            encoder,
            length,
            count,
            QUESTIONS,
            lambda length: lambda index, units: self._draft(length, index, seed, units),
            FEWEST_EDGES,
        )

    def _draft(self, length: int, index: int, seed: int, units: int) -> Draft:
        """Build a prompt with ``units`` edges; questions about the same graph differ in the operation alone."""
        graph = index // QUESTIONS
        edges = random_edges(sample_random(seed, self.name, length, graph), units)
        node, steps, found = asked(edges, self.name, sample_random(seed, "question", length, index))
        operation = OPERATIONS[self.name].format(node=node, steps=steps)
        listed = "\n".join(f"{start} -> {end}" for start, end in edges)
        text = f"{INTRODUCTION}{listed}\n{CLOSING}{operation}"
        details = {"context": graph, "difficulty": steps, "edges": units, "node": node}
        return Draft(text, "", tuple(sorted(found)), details)


def random_edges(draw: random.Random, count: int) -> Edges:
    """So many different edges between random nodes, without loops, in random order."""
    ids = {f"{draw.getrandbits(ID_BITS):08x}" for _ in range(max(count // EDGES_A_NODE, 3))}
    nodes = sorted(ids)
    edges: dict[tuple[str, str], None] = {}
    while len(edges) < min(count, len(nodes) * (len(nodes) - 1)):
        start, end = draw.choice(nodes), draw.choice(nodes)
        if start != end:
            edges[start, end] = None
    return list(edges)


def asked(edges: Edges, question: Question, draw: random.Random) -> tuple[str, int, set[str]]:
    """A node, a number of steps and the answer, which has 1 to ``MOST_NODES`` nodes."""
    nodes = sorted({node for edge in edges for node in edge})
    children: dict[str, list[str]] = {}
    for start, end in edges:
        children.setdefault(start, []).append(end)
    draw.shuffle(nodes)
    # A far distance first, else most questions would ask for near nodes.
    for steps in draw.sample(range(1, MOST_STEPS + 1), MOST_STEPS) if question == "bfs" else [1]:
        for node in nodes[:200]:
            found = (
                at_distance(children, node, steps)
                if question == "bfs"
                else {start for start, end in edges if end == node}
            )
            if 1 <= len(found) <= MOST_NODES:
                return node, steps, found
    raise AssertionError("a graph of this many edges has a node with a child")


def at_distance(children: Mapping[str, Sequence[str]], node: str, steps: int) -> set[str]:
    """The nodes whose shortest path from a node has exactly so many edges."""
    seen, front = {node}, {node}
    for _ in range(steps):
        front = {child for each in front for child in children.get(each, ())} - seen
        seen |= front
    return front


def answered_nodes(answer: str) -> set[str] | None:
    """The nodes of the last line's list; None if the line has no list."""
    lines = answer.strip().splitlines()
    found = _ANSWER.search(lines[-1]) if lines else None
    if found is None:
        return None
    return {each for part in found[1].split(",") if (each := part.strip().strip("'\"`"))}


def f1(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """F1 of the set of nodes; an answer without a list is wrong."""
    found, right = answered_nodes(answer), set(references)
    if found is None:
        return 0.0
    return 2 * len(found & right) / (len(found) + len(right)) if found or right else 1.0


def exact(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the set of nodes is the right one, else 0."""
    return float(answered_nodes(answer) == set(references))


def openai(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """The score as first published, with its two faults, for comparison with older tables.

    The first node keeps the text ``Final Answer: [``, so it never counts; and an answer that shares no node with the
    right one scores 1, even one without a list. The data card still has both after its change of February 2026; lm_eval
    0.4.13 corrects them.
    """
    line = answer.split("\n")[-1]
    found = re.search(r"Final Answer: ?\[.*\]", line)
    listed = found[0].strip("[]").split(",") if found else []
    nodes, right = {each.strip() for each in listed if each.strip()}, set(references)
    both = len(nodes & right)
    recall, precision = both / len(right) if right else 0.0, both / len(nodes) if nodes else 0.0
    return 2 * recall * precision / (recall + precision) if both else 1.0


SUITE = GeneratedSuite(
    name="graphwalks",
    titles={"bfs": "Graph walks, breadth-first search", "parents": "Graph walks, parents"},
    figure="by length",
    tasks=lambda settings: {name: GraphWalks(name) for name in OPERATIONS},
    metrics={"f1": f1, "exact": exact, "openai": openai},
    further={"f1": ("exact", "openai")},
)
