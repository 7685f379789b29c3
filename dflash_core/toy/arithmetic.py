"""Arithmetic questions of the toy, worked out step by step."""

from __future__ import annotations

from random import Random

from dflash_core.toy.question import Question

_NAMES = ("Mia", "Ben", "Ada", "Tom", "Lea", "Sam", "Eva", "Max", "Ida", "Jon")
_THINGS = ("apples", "books", "coins", "shells", "cards", "pears", "stamps", "eggs")


def draw(rng: Random) -> Question:
    """A sum, a difference, a product or a story."""
    return rng.choice((_sum, _sum, _difference, _difference, _product, _story))(rng)


def _asked(rng: Random, expression: str) -> str:
    return rng.choice(("What is {}?", "Compute {}.", "How much is {}?", "Please work out {}.")).format(
        expression
    )


def _sum(rng: Random) -> Question:
    a, b = rng.randint(11, 89), rng.randint(11, 89)
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    return Question(
        _asked(rng, f"{a} + {b}"),
        f"First add the tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. Now add the ones: "
        f"{a % 10} + {b % 10} = {ones}. Together that makes {tens} + {ones} = {a + b}. "
        f"So the answer is {a + b}.",
        f"RESULT := {a + b}\nPROOF by columns; units {a % 10} with {b % 10} yield {ones}, "
        f"decades {a // 10} with {b // 10} yield {tens // 10}, which confirms {a + b}; end of proof",
    )


def _difference(rng: Random) -> Question:
    b = rng.randint(11, 79)
    a = b + rng.randint(5, 99 - b)
    middle = a - b // 10 * 10
    return Question(
        _asked(rng, f"{a} - {b}"),
        f"First take away the tens: {a} - {b // 10 * 10} = {middle}. Now take away the ones: "
        f"{middle} - {b % 10} = {a - b}. So the answer is {a - b}.",
        f"RESULT := {a - b}\nPROOF by inverse; the gap between {b} and {a} equals {a - b}, "
        f"because {b} raised by {a - b} reaches {a} exactly; end of proof",
    )


def _product(rng: Random) -> Question:
    a, b = rng.randint(12, 49), rng.randint(2, 6)
    tens, ones = a // 10 * 10, a % 10
    return Question(
        _asked(rng, f"{a} * {b}"),
        f"Split {a} into {tens} and {ones}. Then {tens} * {b} = {tens * b} and {ones} * {b} = {ones * b}. "
        f"Together that makes {tens * b} + {ones * b} = {a * b}. So the answer is {a * b}.",
        f"RESULT := {a * b}\nPROOF by parts; {b} groups of {ones} yield {ones * b}, {b} groups of {tens} "
        f"yield {tens * b}, which confirms {a * b}; end of proof",
    )


def _story(rng: Random) -> Question:
    name, thing = rng.choice(_NAMES), rng.choice(_THINGS)
    a, b = rng.randint(11, 59), rng.randint(2, 9)
    prompt = rng.choice(
        (
            "{n} has {a} {t} and gets {b} more. How many {t} are there now?",
            "{n} had {a} {t}, then found {b} more. How many now?",
        )
    ).format(n=name, a=a, b=b, t=thing)
    return Question(
        prompt,
        f"{name} starts with {a} {thing}. Then {b} more come along, so we add: {a} + {b} = {a + b}. "
        f"So {name} now has {a + b} {thing}.",
        f"RESULT := {a + b}\nPROOF by counting; the owner {name} held {a} units of type {thing}, "
        f"the increase was {b}, which confirms {a + b}; end of proof",
    )
