"""The demo's prompts: a long log book with three marked facts, and fillers of the same make.

Made by code and the same on every run: the demo compares texts across server restarts, so its
prompts may not change. The sentences are drawn from a grammar with names, numbers and times in
them, because a model that reads the same line a hundred times falls into a loop, and a loop
hides a wrong byte.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CountTokens = Callable[[str], int]
"""Tokens of a text, special tokens left out."""

FACT_DEPTHS = (0.1, 0.5, 0.9)
"""Where the facts stand, as a share of the document."""

_PEOPLE = (
    "Amara", "Bastien", "Chidi", "Dagny", "Eluned", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Katya",
    "Lior", "Mirela", "Nadim", "Oskar", "Pilar", "Quentin", "Rosa", "Sunniva", "Tomas",
)  # fmt: skip
_PLACES = (
    "the east pier", "the boat shed", "the lamp room", "the north slipway", "the tide gauge",
    "the radio hut", "the fuel store", "the old quarry", "the cistern", "the weather mast",
    "the landing stage", "the workshop",
)  # fmt: skip
_THINGS = (
    "a coil of tarred rope", "two crates of lamp glass", "a spare bilge pump", "the brass barometer",
    "a sack of coarse salt", "the survey chain", "nine tins of red lead", "a mended net", "the signal flags",
    "a drum of paraffin", "the long ladder", "a box of copper nails",
)  # fmt: skip
_WEATHER = (
    "fog from the sound", "a dry easterly", "short heavy showers", "thin high cloud", "a falling glass",
    "swell without wind", "sleet until noon", "clear air and a hard frost",
)  # fmt: skip
_DEEDS = (
    "carried {thing} to {place}", "found {thing} behind {place}", "signed for {thing} at {place}",
    "measured the water at {place} and wrote down {number} centimetres",
    "counted {number} birds from {place} before the light went",
    "repaired the door of {place} with {number} screws", "left {thing} at {place} for {other}",
    "waited at {place} for {other}, who came {number} minutes late",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """A line to find again.

    Attributes:
        line: what stands in the document.
        question: what to ask for it.
        token: shows in an answer that the line was found.
    """

    line: str
    question: str
    token: str


FACTS = (
    Fact("FACT HERON: the password of the lamp room is heron 4417.", "What is FACT HERON?", "4417"),
    Fact("FACT ORANGE: the colour of the rescue boat is orange 2056.", "What is FACT ORANGE?", "2056"),
    Fact("FACT CHARLIE: the name of the station cat is Charlie 8391.", "What is FACT CHARLIE?", "8391"),
)


@dataclass(frozen=True)
class Document:
    """A long text, and what is asked about it.

    Attributes:
        text: the log book.
        questions: one prompt each: the log book with a question under it.
        fact_depths: where each fact begins, as a share of the log book's characters.
    """

    text: str
    questions: tuple[str, ...]
    fact_depths: tuple[float, ...]


def make_document(count_tokens: CountTokens, tokens_min: int) -> Document:
    """The document of the demo: at least ``tokens_min`` tokens, three facts at `FACT_DEPTHS`."""
    entries = _entries("Skerry Point", seed=1, count_tokens=count_tokens, tokens_min=tokens_min)
    lines = list(entries)
    # From the back, so that an insertion does not move the places still to come.
    for fact, depth in sorted(zip(FACTS, FACT_DEPTHS, strict=True), key=lambda pair: -pair[1]):
        lines.insert(round(depth * len(entries)), fact.line)
    text = "\n".join(lines)
    return Document(
        text=text,
        questions=tuple(f"{text}\n\n{fact.question}" for fact in FACTS),
        fact_depths=tuple(text.index(fact.line) / len(text) for fact in FACTS),
    )


def make_filler(index: int, count_tokens: CountTokens, tokens_min: int) -> str:
    """A prompt that shares no block with the document or with another filler.

    Args:
        index: which filler, from 0.
        count_tokens: the model's own tokenizer.
        tokens_min: the length to reach.
    """
    entries = _entries(f"Holm {index}", seed=1000 + index, count_tokens=count_tokens, tokens_min=tokens_min)
    return "\n".join(entries) + "\n\nWhat was the weather on the first day?"


def facts_found(answers: Sequence[str]) -> int:
    """How many of `FACTS` stand in the answers to their own questions."""
    return sum(fact.token in answer for fact, answer in zip(FACTS, answers, strict=True))


def _entries(station: str, seed: int, count_tokens: CountTokens, tokens_min: int) -> list[str]:
    """Day entries of a log book, so many that they hold ``tokens_min`` tokens."""
    dice = random.Random(seed)
    lines = [f"Log book of {station} station."]
    tokens = count_tokens(lines[0])
    day = 0
    while tokens < tokens_min:
        day += 1
        line = _entry(dice, day)
        lines.append(line)
        tokens += count_tokens(line)
    return lines


def _entry(dice: random.Random, day: int) -> str:
    people = dice.sample(_PEOPLE, 3)
    deeds = dice.sample(_DEEDS, 2)
    first, second = (
        deed.format(
            thing=dice.choice(_THINGS),
            place=dice.choice(_PLACES),
            number=dice.randint(11, 97),
            other=people[2],
        )
        for deed in deeds
    )
    clock = f"{dice.randint(5, 20):02d}:{dice.randint(0, 59):02d}"
    weather = dice.choice(_WEATHER)
    return f"Day {day}, {clock}, {weather}. {people[0]} {first}. Later {people[1]} {second}."
