"""bAbI's worlds: people who move and take, leave and give things, told in facts, and questions with one answer.

The wording is that of bAbI's first five tasks, and the simulation is our own. Unlike bAbI, it asks only what has one
answer, and a question needs as many facts as the task's name says.

Source: Weston et al., arXiv:1502.05698; facebookarchive/bAbI-tasks (BSD).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
PEOPLE = ("Daniel", "John", "Mary", "Sandra")
GIVERS = ("Bill", "Fred", "Jeff", "Mary")
MOVED = ("went", "journeyed", "travelled", "moved", "went back")
TOOK = ("took", "grabbed", "got", "picked up")
LEFT = ("dropped", "discarded", "left", "put down")
GAVE = ("gave", "handed", "passed")
DIRECTIONS = (("north", "south"), ("east", "west"))


@dataclass(frozen=True)
class Story:
    """Facts in order, a question with its answer, and the numbers of the facts that the answer needs."""

    facts: Sequence[str]
    question: str
    answer: str
    needed: Sequence[int]


def where_is_person(draw: random.Random) -> Story:
    """qa1: people move; the last move of one answers."""
    places = dict(zip(PEOPLE, draw.choices(PLACES, k=len(PEOPLE)), strict=True))
    facts, last = [], {}
    for step in range(draw.randint(2, 10)):
        who = draw.choice(PEOPLE)
        places[who] = draw.choice([place for place in PLACES if place != places[who]])
        facts.append(f"{who} {draw.choice(MOVED)} to the {places[who]}.")
        last[who] = step
    asked = draw.choice(sorted(last))
    return Story(facts, f"Where is {asked}?", places[asked], [last[asked]])


class World:
    """People who move, and take, leave or give things; the places at the beginning are not told.

    Attributes:
        facts: what was told.
        moves: number of the last told move of each person.
        taken: of each thing, the number of the fact that someone took it last.
        lying: of each thing that was left, the two facts that tell where; None if the first of them was not told.
        routes: of each thing, the places that follow from the facts, in order.
        carried: of each thing, the places of the last move with it (from, to), and the three facts that tell them; None
            if the first of them was not told.
        gifts: number, giver, thing and receiver of each gift.
    """

    def __init__(self, draw: random.Random, people: Sequence[str]) -> None:
        self.draw, self.people = draw, people
        self.places = {each: draw.choice(PLACES) for each in (*people, *THINGS)}
        self.holders: dict[str, str] = {}
        self.facts: list[str] = []
        self.moves: dict[str, int] = {}
        self.taken: dict[str, int] = {}
        self.lying: dict[str, list[int] | None] = {}
        self.routes: dict[str, list[str]] = {thing: [] for thing in THINGS}
        self.carried: dict[str, tuple[str, str, list[int]] | None] = {}
        self.gifts: list[tuple[int, str, str, str]] = []

    def go_on(self, *actions: Callable[[str], str | None]) -> None:
        """Let a random person do something that is possible, and tell it."""
        fact = None
        while fact is None:
            fact = self.draw.choice(actions)(self.draw.choice(self.people))
        self.facts.append(fact)

    def move(self, who: str) -> str:
        """Go to another place, with all that the person holds."""
        before = self.places[who]
        place = self.places[who] = self.draw.choice([each for each in PLACES if each != before])
        for thing in self._held(who):
            told = [self.moves[who], self.taken[thing], len(self.facts)] if who in self.moves else None
            self.carried[thing] = None if told is None else (before, place, told)
            self.routes[thing].append(place)
        self.moves[who] = len(self.facts)
        return f"{who} {self.draw.choice(MOVED)} to the {place}."

    def take(self, who: str) -> str | None:
        """Take a thing that lies where the person is."""
        here = [each for each in THINGS if each not in self.holders and self.places[each] == self.places[who]]
        if not here:
            return None
        thing = self.draw.choice(here)
        self.holders[thing] = who
        if who in self.moves and not self.routes[thing]:
            self.routes[thing].append(self.places[who])
        self.taken[thing] = len(self.facts)
        return f"{who} {self.draw.choice(TOOK)} the {thing}{self.draw.choice(('', ' there'))}."

    def leave(self, who: str) -> str | None:
        """Leave a thing that the person holds where they are."""
        held = self._held(who)
        if not held:
            return None
        thing = self.draw.choice(held)
        del self.holders[thing]
        self.places[thing] = self.places[who]
        self.lying[thing] = [self.moves[who], len(self.facts)] if who in self.moves else None
        return f"{who} {self.draw.choice(LEFT)} the {thing}{self.draw.choice(('', ' there'))}."

    def give(self, who: str) -> str | None:
        """Give a thing to another person who is there."""
        held, near = self._held(who), [each for each in self.people if self.places[each] == self.places[who]]
        near.remove(who)
        if not held or not near:
            return None
        thing, other = self.draw.choice(held), self.draw.choice(near)
        self.holders[thing] = other
        self.gifts.append((len(self.facts), who, thing, other))
        return f"{who} {self.draw.choice(GAVE)} the {thing} to {other}."

    def _held(self, who: str) -> list[str]:
        return [thing for thing, holder in self.holders.items() if holder == who]


def where_is_thing(draw: random.Random) -> Story | None:
    """qa2: who took a thing or left it, and where they were then or are now."""
    world = World(draw, PEOPLE)
    for _ in range(draw.randint(4, 20)):
        world.go_on(world.move, world.take, world.leave)
    known = []
    for thing in THINGS:
        who = world.holders.get(thing)
        if who in world.moves:
            known.append((thing, world.places[who], [world.taken[thing], world.moves[who]]))
        elif who is None and (told := world.lying.get(thing)):
            known.append((thing, world.places[thing], told))
    if not known:
        return None
    asked, place, needed = draw.choice(known)
    return Story(world.facts, f"Where is the {asked}?", place, needed)


def where_was_thing(draw: random.Random) -> Story | None:
    """qa3: where a person was who took a thing, before they carried it to another place."""
    world = World(draw, PEOPLE)
    for _ in range(draw.randint(6, 30)):
        world.go_on(world.move, world.take, world.leave)
    # Only places where the thing was once: else several answers are right.
    known = [
        (thing, *carried)
        for thing, carried in world.carried.items()
        if carried and world.routes[thing].count(carried[1]) == 1
    ]
    if not known:
        return None
    thing, before, place, needed = draw.choice(known)
    return Story(world.facts, f"Where was the {thing} before the {place}?", before, needed)


def what_is_beside(draw: random.Random) -> Story:
    """qa4: three places in a row, told by two relations, and what is on one side of the one in the middle."""
    row = draw.sample(PLACES, 3)
    ahead, back = draw.choice(DIRECTIONS)
    # Each place lies ahead of the one before it.
    facts = [
        draw.choice((f"The {far} is {ahead} of the {near}.", f"The {near} is {back} of the {far}."))
        for near, far in pairwise(row)
    ]
    needed = draw.randrange(2)
    side, other = (ahead, back) if needed else (back, ahead)
    question = draw.choice((f"What is {side} of the {row[1]}?", f"What is the {row[1]} {other} of?"))
    order = draw.sample(range(2), 2)
    return Story([facts[each] for each in order], question, row[2 * needed], [order.index(needed)])


def who_gave(draw: random.Random) -> Story | None:
    """qa5: the giver, the thing or the receiver of a gift."""
    world = World(draw, GIVERS)
    for _ in range(draw.randint(5, 20)):
        world.go_on(world.move, world.take, world.leave, world.give)
    found = []
    for step, giver, thing, other in world.gifts:
        asked = {
            f"What did {giver} give to {other}?": (thing, (giver, None, other)),
            f"Who gave the {thing} to {other}?": (giver, (None, thing, other)),
            f"Who did {giver} give the {thing} to?": (other, (giver, thing, None)),
            f"Who gave the {thing}?": (giver, (None, thing, None)),
            f"Who received the {thing}?": (other, (None, thing, None)),
        }
        for question, (answer, said) in asked.items():
            gifts = [
                gift
                for _, *gift in world.gifts
                if all(a in (None, b) for a, b in zip(said, gift, strict=True))
            ]
            # bAbI asks for the last one of several gifts.
            if len(gifts) == 1:
                found.append((question, answer, [step]))
    return Story(world.facts, *draw.choice(found)) if found else None
