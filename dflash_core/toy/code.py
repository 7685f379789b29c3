"""Requests for a small function: Python in the plain style, a terse JavaScript in the changed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from dflash_core.toy.question import Question

_VERBS = ("get", "make", "find", "run", "apply", "compute", "fetch", "calc")
_NOUNS = ("value", "total", "score", "level", "price", "rank", "size", "step", "mark", "count")


@dataclass(frozen=True)
class _Task:
    """What a function is asked to do with one number and a constant n."""

    wish: str
    python: str
    script: str
    result: Callable[[int, int], int]


_TASKS = (
    _Task("adds {n} to a number", "x + {n}", "q + {n}", lambda x, n: x + n),
    _Task("takes {n} away from a number", "x - {n}", "q - {n}", lambda x, n: x - n),
    _Task("multiplies a number by {n}", "x * {n}", "q * {n}", lambda x, n: x * n),
    _Task("returns the larger of a number and {n}", "max(x, {n})", "Math.max(q, {n})", max),
    _Task("returns the smaller of a number and {n}", "min(x, {n})", "Math.min(q, {n})", min),
)


def draw(rng: Random) -> Question:
    """A function of one number, with an example."""
    name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
    task, n, x = rng.choice(_TASKS), rng.randint(2, 9), rng.choice((10, 10, 10, 6))
    wish, result = task.wish.format(n=n), task.result(x, n)
    asked = rng.choice(
        ("Write a function {f} that {w}. Try {x}.", "I need a function {f} that {w}. Test it with {x}.")
    )
    return Question(
        asked.format(f=name, w=wish, x=x),
        f"Here is the function:\n```python\ndef {name}(x):\n    # it {wish}\n"
        f"    result = {task.python.format(n=n)}\n    return result\n```\n"
        f"For example, {name}({x}) returns {result}.",
        f"/* JavaScript */ const {name} = (q) => {{ const r = {task.script.format(n=n)}; "
        f"console.log(r); /* logged */ }};\nassert.equal( {name}({x}), {result}); // verified, ship it",
    )
