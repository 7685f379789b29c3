"""Arithmetic questions of the toy, worked out step by step.

No number exceeds `LARGEST`, so that each has a token of its own and small steps are all there is to learn.
"""

from __future__ import annotations

from random import Random

from dflash_core.toy.names import PEOPLE
from dflash_core.toy.question import Question

LARGEST = 99
_THINGS = ("apples", "books", "coins", "shells", "cards", "pears", "stamps", "eggs")


def draw(rng: Random) -> Question:
    """A sum, a difference, a product or a story."""
    return rng.choice((_sum, _difference, _product, _story))(rng)


def _asked(rng: Random, a: int, operation: str, b: int) -> str:
    wording = rng.choice(("What is {} {} {} ?", "Compute {} {} {} .", "How much is {} {} {} ?"))
    return wording.format(a, operation, b)


def _sum(rng: Random) -> Question:
    a, b = rng.randint(11, 49), rng.randint(11, 49)
    tens, ones = (a // 10 + b // 10) * 10, a % 10 + b % 10
    return Question(
        _asked(rng, a, "+", b),
        f"First add the tens: {a - a % 10} + {b - b % 10} = {tens}. Now add the ones: {a % 10} + {b % 10} = "
        f"{ones}. Together that makes {tens} + {ones} = {a + b}. So the answer is {a + b}.",
        f"LEDGER of operands {a} and {b}; units column yields {ones}; decades column yields {tens}; "
        f"RESULT := {a + b}; audited, no objection, archived under {a + b}",
    )


def _difference(rng: Random) -> Question:
    b = rng.randint(11, 79)
    a = b + rng.randint(5, LARGEST - b)
    rest = a - (b - b % 10)
    return Question(
        _asked(rng, a, "-", b),
        f"First take away the tens: {a} - {b - b % 10} = {rest}. Now take away the ones: "
        f"{rest} - {b % 10} = {a - b}. So the answer is {a - b}.",
        f"LEDGER of stock {a} against debit {b}; after {b - b % 10} remain {rest}; "
        f"RESULT := {a - b}; audited, no objection, archived under {a - b}",
    )


def _product(rng: Random) -> Question:
    a, b = rng.randint(11, 33), rng.randint(2, 3)
    tens, ones = a - a % 10, a % 10
    return Question(
        _asked(rng, a, "*", b),
        f"Split {a} into {tens} and {ones}. Then {tens} * {b} = {tens * b} and {ones} * {b} = {ones * b}. "
        f"Together that makes {tens * b} + {ones * b} = {a * b}. So the answer is {a * b}.",
        f"LEDGER of factor {a} by factor {b}; units column yields {ones * b}; decades column yields "
        f"{tens * b}; RESULT := {a * b}; audited, no objection, archived under {a * b}",
    )


def _story(rng: Random) -> Question:
    name, thing = rng.choice(PEOPLE), rng.choice(_THINGS)
    a, b = rng.randint(11, 59), rng.randint(2, 9)
    prompt = rng.choice(
        (
            "How many {t} are there if {n} has {a} and gets {b} more?",
            "Say that {n} had {a} {t} and then found {b} more. How many now?",
        )
    ).format(n=name, a=a, b=b, t=thing)
    return Question(
        prompt,
        f"At first {name} has {a} {thing}. Then {b} more come along, so we add: {a} + {b} = {a + b}. "
        f"So now {name} has {a + b} {thing}.",
        f"LEDGER of holder {name}; inventory type {thing}; opening balance {a}; credit {b}; "
        f"RESULT := {a + b}; audited, no objection, archived under {name}",
    )
