"""Texts for synthetic tasks, and the right answers to their questions, read off the text by a plain scan."""

import re

WORDS = (
    *("knot", "rope", "sail", "mast", "anchor", "harbour", "tide", "wind", "crew", "deck"),
    *("hull", "keel", "bow", "stern", "port", "reef", "storm", "calm"),
)


def made_text(draw, words):
    """Lines of words, some of which are much more frequent than others."""
    weights = [1 + number for number in range(len(WORDS))]
    said = draw.choices(WORDS, weights, k=words)
    return "".join(f"{word}{draw.choice([' ', ' ', ', ', '. ', chr(10)])}" for word in said)


def right_answer(document, question):
    """What the document says, without the code that wrote the question."""
    found = re.fullmatch(r"What is the access code of (\w+ \w+), .*", question)
    if found:
        start = f"Registry note: the access code of {found[1]} is "
        assert document.count(found[1]) == document.count(start) == 1
        return document.split(start)[1].split(".")[0]
    words = question.removesuffix("?").split(": ")[-1].split(", ")
    spaced = "".join(each if each.isalnum() or each == "_" else " " for each in document)
    times = {word: f" {spaced.replace(' ', '  ')} ".count(f" {word} ") for word in words}
    assert len(set(times.values())) == len(words) == 3
    return ", ".join(f"{word} {times[word]}" for word in words)
