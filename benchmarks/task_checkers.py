"""Solvers of the suites that are made by seed: each finds the right answer in the prompt's text alone.

Their algorithms are others than the generators'. The tests use them as models that know everything, and
``benchmarks.task_samples`` checks many samples with them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import networkx  # type: ignore[import-untyped]

from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.counting import CLASSES
from ropewalk.evaluation.tasks.nolima import FACTS
from ropewalk.evaluation.tasks.registry import METRICS


@dataclass(frozen=True)
class Checker:
    """What is right in the prompts of a suite.

    Attributes:
        answer: maps a prompt's whole text to the answer of a perfect model. It raises AssertionError if the text has no
            right answer, or several.
        is_needle: whether a text is a whole needle of a sample, for the texts at the sample's ``spans``.
    """

    answer: Callable[[str], str]
    is_needle: Callable[[Sample, str], bool] | None = None


LEAST_FILL = 0.99


def check(sample: Sample) -> None:
    """Raise AssertionError unless a sample has one right answer, which is its reference, whole needles, and is full."""
    checker = CHECKERS[sample.suite]
    said = checker.answer(sample.whole)
    assert METRICS[sample.metric](said, sample.references, sample.details) == 1, (sample.references, said)
    assert LEAST_FILL <= sample.fill <= 1, sample.fill
    if checker.is_needle is not None:
        needles = [sample.whole[start:end] for start, end in sample.details["spans"]]
        assert needles
        assert all(checker.is_needle(sample, needle) for needle in needles), needles


def graphwalks_nodes(prompt: str) -> set[str]:
    """What networkx finds for the operation of a prompt."""
    listed, _, operation = prompt.partition("The graph has these edges:\n")[2].partition("\n\n")
    graph = networkx.DiGraph(line.split(" -> ") for line in listed.splitlines())
    if found := re.search(r"Operation: Find the parents of node (\w+)\.$", operation):
        return set(graph.predecessors(found[1]))
    node, depth = re.findall(r"Operation: Perform a BFS from node (\w+) with depth (\d)\.$", operation)[0]
    distances = networkx.single_source_shortest_path_length(graph, node)
    return {other for other, distance in distances.items() if distance == int(depth)}


def graphwalks_answer(prompt: str) -> str:
    """The line that names the nodes."""
    return f"I follow the edges.\nFinal Answer: [{', '.join(graphwalks_nodes(prompt))}]\n"


def nolima_name(prompt: str) -> str:
    """The person of the fact that the question is about, by a table of what the world knows, wherever it stands."""
    text, _, question = prompt.partition("\n\nQuestion: ")
    (known,) = (needle for needle, *questions in FACTS if question.splitlines()[0] in questions)
    (name,) = re.findall(rf"(?:^|\s)(\w+){re.escape(known.removeprefix('{}'))}", text)
    return str(name)


def icl_label(prompt: str) -> str:
    """The one label of all words of the last text that occur in shots of a single label."""
    *shots, question = re.findall(r"(.+)\nlabel:(?: (\d+)\n)?", prompt)
    labels: dict[str, set[str]] = {}
    for text, label in shots:
        for word in re.findall(r"\w+", text):
            labels.setdefault(word, set()).add(label)
    told = [labels[word] for word in re.findall(r"\w+", question[0]) if len(labels[word]) == 1]
    (found,) = set.union(*told)
    return f" {found}\n"


def mrcr_answer(prompt: str) -> str:
    """The string and the text that the last request of a chat asks for, from its lines alone."""
    chat = prompt.rpartition("======END EXAMPLE======\n\n")[2]
    *turns, last = re.split(r"^(?:User|Assistant): ?", chat, flags=re.MULTILINE)
    assert not last, "the prompt ends where the answer begins"
    *turns, question = (turn.removesuffix("\n") for turn in turns)
    found = re.fullmatch(
        r"Prepend (\w{10}) to the (\d)\w\w \(1 indexed\) (.+?) about (.+?)\. Do not .+ response\.",
        question,
    )
    assert found is not None, question
    answers = [
        said
        for asked, said in zip(turns[::2], turns[1::2], strict=True)
        if asked == f"write a {found[3]} about {found[4]}"
    ]
    assert len(set(answers)) == len(answers)
    assert found[1] not in chat.rpartition("User: ")[0]
    return found[1] + answers[int(found[2]) - 1]


def mrcr_needle(sample: Sample, needle: str) -> bool:
    """Whether a text is that of the reference, and the whole answer of a turn."""
    return sample.references[0][10:] == needle and ("assistant", needle) in sample.earlier


def counting_answer(prompt: str) -> str:
    """The count, comparison or user that the lines give, whose class is the one with a word in the line."""
    listed, _, question = prompt.partition("\n\nQuestion: ")
    asked = question.splitlines()[0]
    lines = [line for line in listed.splitlines() if line.startswith("Date: ")]

    def about(name: str, among: Sequence[str] = lines) -> list[str]:
        return [line for line in among if re.search(rf"\b({'|'.join(CLASSES[name])})\b", line)]

    named = sorted((name for name in CLASSES if name in asked), key=asked.index)
    first = about(named[0])
    if len(named) == 2:
        second = about(named[1])
        assert len(first) != len(second)
        more = "more" if len(first) > len(second) else "less"
        return f"{len(first)} and {len(second)}: {named[0]} are {more} common than {named[1]}"
    if asked.startswith("Which user"):
        users = [line.split()[6] for line in first]
        best = max(users.count(user) for user in users)
        (user,) = {user for user in users if users.count(user) == best}
        return f"Answer: {user}"
    if month := re.search(r"date in (\w{3})", asked):
        first = [line for line in first if line.startswith(f"Date: {month[1]}")]
    if user_asked := re.search(r"of user (\d+)", asked):
        first = [line for line in first if f"User: {user_asked[1]} " in line]
    return f"Answer: {len(first)}"


def ruler2_values(prompt: str) -> list[str]:
    """The numbers of the key that the end of the prompt names, in the order of the lines."""
    (key,) = re.findall(r"What (?:is|are all) the special magic numbers? for (.+) mentioned in .+\?", prompt)
    return re.findall(rf" for {re.escape(key)} is: (\d+)\.", prompt)


def ruler2_needle(sample: Sample, needle: str) -> bool:
    """Whether a text is the line of one of the values."""
    lines = [f"magic numbers for {sample.details['key']} is: {value}." for value in sample.references]
    return needle.startswith("One of the special ") and any(needle.endswith(line) for line in lines)


MOVE = r"(?P<mover>[A-Z][a-z]+) (?:went|went back|journeyed|travelled|moved) to the (?P<place>[a-z]+)\."
TAKE = r"(?P<taker>[A-Z][a-z]+) (?:took|got|grabbed|picked up) the (?P<taken>[a-z]+)(?: there)?\."
LEAVE = r"(?P<leaver>[A-Z][a-z]+) (?:left|dropped|discarded|put down) the (?P<left>[a-z]+)(?: there)?\."
GIFT = r"(?P<giver>[A-Z][a-z]+) (?:gave|handed|passed) the (?P<gift>[a-z]+) to (?P<receiver>[A-Z][a-z]+)\."
RELATION = r"The (?P<a>[a-z]+) is (?P<side>north|south|east|west) of the (?P<b>[a-z]+)\."
FACT = re.compile("|".join((MOVE, TAKE, LEAVE, GIFT, RELATION)))
SIDES = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}


def babilong_answer(prompt: str) -> str:
    """The sentence or word that answers the question, by looking back from the end of the facts."""
    context, _, question = prompt.partition("<context>\n")[2].partition("\n</context>\nQuestion: ")
    facts = [found.groupdict() for found in FACT.finditer(context)]

    def where(thing: str, facts: list[dict[str, str]]) -> str | None:
        """Where a person or thing is after some facts, as far as they tell."""
        for number, fact in reversed([*enumerate(facts)]):
            if fact["mover"] == thing:
                return fact["place"]
            if fact["taken"] == thing:
                return where(fact["taker"], facts)
            if fact["left"] == thing:
                return where(fact["leaver"], facts[:number])
        return None

    if found := re.fullmatch(r"Where is (the )?(\w+)\?", question):
        start = f"The {found[2]} is in the" if found[1] else f"The most recent location of {found[2]} is"
        place = where(found[2], facts)
        assert place is not None
        return f"{start} {place}."
    if found := re.fullmatch(r"Where was the (\w+) before the (\w+)\?", question):
        known = [place for end in range(len(facts)) if (place := where(found[1], facts[: end + 1]))]
        route = [place for place, _ in itertools.groupby(known)]
        assert route.count(found[2]) == 1, route
        return f"Before the {found[2]} the {found[1]} was in the {route[route.index(found[2]) - 1]}."
    if found := re.fullmatch(r"What is (?:(?:the (\w+) (\w+) of)|(?:(\w+) of the (\w+)))\?", question):
        centre, side = found[1] or found[4], SIDES[found[2] or found[3]]
        # "What is the a north of?" asks for what lies south of a.
        wanted = (-side[0], -side[1]) if found[1] else side
        lies = {fact["a"]: SIDES[fact["side"]] for fact in facts if fact["b"] == centre}
        for fact in facts:
            if fact["a"] == centre:
                across, up = SIDES[fact["side"]]
                lies[fact["b"]] = -across, -up
        (answer,) = (place for place, at in lies.items() if at == wanted)
        return answer
    asked = {
        r"What did (?P<giver>\w+) give to (?P<receiver>\w+)\?": "gift",
        r"Who gave the (?P<gift>\w+) to (?P<receiver>\w+)\?": "giver",
        r"Who did (?P<giver>\w+) give the (?P<gift>\w+) to\?": "receiver",
        r"Who gave the (?P<gift>\w+)\?": "giver",
        r"Who received the (?P<gift>\w+)\?": "receiver",
    }
    ((said, part),) = (
        (found, part) for form, part in asked.items() if (found := re.fullmatch(form, question))
    )
    (answer,) = (fact[part] for fact in facts if fact["gift"] and said.groupdict().items() <= fact.items())
    return answer


CHECKERS: Mapping[str, Checker] = {
    "graphwalks": Checker(graphwalks_answer),
    "nolima": Checker(
        nolima_name, lambda sample, text: any(text == f[0].format(sample.references[0]) for f in FACTS)
    ),
    "counting": Checker(counting_answer),
    "ruler2": Checker(lambda prompt: " ".join(ruler2_values(prompt)), ruler2_needle),
    "icl": Checker(icl_label, lambda sample, text: f"{text}\nlabel: {sample.references[0]}\n" in sample.text),
    "mrcr": Checker(mrcr_answer, mrcr_needle),
    "babilong": Checker(babilong_answer, lambda sample, text: FACT.fullmatch(text) is not None),
}
"""By suite."""
