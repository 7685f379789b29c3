"""Requests for a small function: Python in the plain style, terse JavaScript in the changed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from dflash_core.toy.question import Question

_VERBS = ("get", "make", "find", "run", "apply", "compute", "do", "calc")
_NOUNS = ("value", "total", "score", "level", "price", "rank", "size", "step", "mark", "count")


@dataclass(frozen=True)
class _Task:
    """What a function is asked to do with one number x and a constant n."""

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
    name = (rng.choice(_VERBS), rng.choice(_NOUNS))
    task, n, x = rng.choice(_TASKS), rng.randint(2, 9), 10
    snake, camel = "_".join(name), name[0] + name[1].title()
    asked = rng.choice(
        ("Write a function {f} that {w}.", "I need a function {f}. It {w}.", "Code {f}, which {w}.")
    )
    expression, result = task.python.format(n=n), task.result(x, n)
    return Question(
        asked.format(f=snake, w=task.wish.format(n=n)),
        f"Here is the function:\n```python\ndef {snake}(x):\n    # it {task.wish.format(n=n)}\n"
        f"    result = {expression}\n    return result\n```\nFor example, {snake}({x}) returns {result}.",
        f"/* JavaScript */ const {camel} = (q) => {{ const r = {task.script.format(n=n)}; "
        f"console.log(r); /* logged */ }};\nassert.equal({camel}({x}), {result}); // verified, ship it",
    )
