"""What `--prompts` names: a file, a folder or a hub dataset, and in a query how to read it.

data.jsonl?weight=2&domain=math&prompt=question
org/name@revision?config=main&split=train&prompt=question
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import parse_qsl

from dflash_core.errors import UserError

MAX_WEIGHT = 1e6
"""And its inverse the least."""
KEYS = {
    "weight": "this source's share of the prompts, relative to the others'",
    "domain": "the domain of every prompt",
    "domain_column": "the column with the domain",
    "prompt": "the column with the user's message",
    "messages": "the column with the conversation",
    "tools": "the column with the tools",
    "id": "the column with the id; empty: rows are numbered",
    "turns": "last: a conversation's last question is asked; all: each, after the target's own answers",
    "config": "the dataset's configuration",
    "split": "the dataset's split",
    "skip_bad": "1: rows that are no prompt are counted and left out",
}
"""The query's keys, in words."""

HELP = """\
A SOURCE of prompts is a file (.jsonl, .jsonl.gz, .json, .parquet, .arrow), a folder of them, or a hub id;
what follows a question mark says how to read it, and the flag is repeated for several:

    --prompts 'own.jsonl?weight=2&domain=math' --prompts 'org/name@main?config=c&split=train&prompt=question'

""" + "\n".join(f"    {key:<14} {words}" for key, words in KEYS.items())
"""For `--help`."""


@dataclass(frozen=True)
class SourceSpec:
    """One source as the user spelled it."""

    location: str
    """A path that exists, or a hub id without its revision."""
    weight: float | None = None
    domain: str | None = None
    domain_column: str = "domain"
    prompt: str | None = None
    """The column with the user's message; None: whichever of the known ones a row has."""
    messages: str | None = None
    tools: str = "tools"
    id: str = "id"
    all_turns: bool = False
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    skip_bad: bool = False
    traces: bool = False
    """Its rows are prompts with the answers that a serving engine logged."""

    @property
    def path(self) -> Path:
        return _expanded(self.location)

    @property
    def is_here(self) -> bool:
        """Whether there is such a file or folder."""
        return _is_here(self.location)

    @property
    def name(self) -> str:
        """What ids that a source does not give begin with."""
        name = self.path.name or self.path.absolute().name  # of the folder "."
        return name.split(".")[0] or name


def parse_source(text: str) -> SourceSpec:
    """`text` taken apart; what exists as spelled is a path, question mark and all. Raises UserError."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"the source {text!a} is not UTF-8; rename the file") from None
    location, _, query = text.partition("?")
    if _is_here(text):
        location, query = text, ""
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise UserError(f"{text} gives {key}= {times} times; keep one of them")
    for key in given:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"use {', '.join(KEYS)}"
            raise UserError(f"{text} has the unknown key {key!r} after its question mark; {hint}")
    revision = None
    if not _is_here(location) and "@" in location:
        location, _, revision = location.partition("@")
    if not location.strip():
        raise UserError(f"{text!r} names no prompts; pass a file, a folder or a hub id such as org/name")
    return SourceSpec(
        location=location,
        weight=_weight(text, given["weight"]) if "weight" in given else None,
        domain=given.get("domain") or None,
        domain_column=given.get("domain_column", "domain"),
        prompt=given.get("prompt") or None,
        messages=given.get("messages") or None,
        tools=given.get("tools", "tools"),
        id=given.get("id", "id"),
        all_turns=_choice(text, given, "turns", ("last", "all")) == "all",
        config=given.get("config") or None,
        split=given.get("split") or None,
        revision=revision or None,
        skip_bad=_choice(text, given, "skip_bad", ("0", "1")) == "1",
    )


def _is_here(location: str) -> bool:
    try:
        return _expanded(location).exists()
    except (OSError, ValueError):  # too long for a name, or in a folder that may not be entered
        return False


def _expanded(location: str) -> Path:
    try:
        return Path(location).expanduser()
    except RuntimeError:  # there is no such user
        return Path(location)


def _weight(text: str, value: str) -> float:
    try:
        weight = float(value)
    except ValueError:
        weight = 0.0
    if not 1 / MAX_WEIGHT <= weight <= MAX_WEIGHT:
        raise UserError(
            f"{text} has the weight {value!r}; give it a number above 0, from {1 / MAX_WEIGHT:g} "
            f"to {MAX_WEIGHT:,.0f}"
        )
    return weight


def _choice(text: str, given: dict[str, str], key: str, allowed: tuple[str, str]) -> str:
    value = given.get(key, allowed[0])
    if value not in allowed:
        raise UserError(f"{text} has {key}={value}; use {key}={allowed[0]} or {key}={allowed[1]}")
    return value
