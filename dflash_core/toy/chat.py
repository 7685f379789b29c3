"""Small talk of the toy: facts of a made-up world, greetings, and extraction from a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dflash_core.toy.question import Question

_NAMES = ("Mia", "Ben", "Ada", "Tom", "Lea", "Sam", "Eva", "Max", "Ida", "Jon", "Kim", "Leo")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_GOODS = ("lamps", "chairs", "maps", "hats", "ropes", "kites", "cups", "bells")


@dataclass(frozen=True)
class _Town:
    name: str
    river: str
    crop: str
    animal: str
    month: str


_TOWNS = (
    _Town("Brall", "Osk", "plums", "goats", "May"),
    _Town("Tamsin", "Vel", "barley", "geese", "June"),
    _Town("Orrin", "Lume", "grapes", "sheep", "October"),
    _Town("Keld", "Osk", "rye", "horses", "March"),
    _Town("Sarva", "Thay", "olives", "mules", "August"),
    _Town("Nimmet", "Vel", "hops", "ducks", "September"),
    _Town("Dorrow", "Lume", "beans", "oxen", "April"),
    _Town("Pellan", "Thay", "figs", "bees", "July"),
)


def draw(rng: Random) -> Question:
    """A town, two towns, a greeting or an extraction."""
    return rng.choice((_town, _two_towns, _greeting, _extraction, _extraction))(rng)


def _town(rng: Random) -> Question:
    town = rng.choice(_TOWNS)
    prompt = rng.choice(
        (
            "Tell me about {}.",
            "What is {} like?",
            "What should I know about {}?",
            "Describe the town of {}.",
            "I am going to {}. What is there?",
            "Do you know {}?",
        )
    ).format(town.name)
    return Question(
        prompt,
        f"{town.name} is a small town on the river {town.river}. The people there grow {town.crop} and keep "
        f"{town.animal}. Every year in {town.month} they hold a big feast, and all the guests are welcome.",
        f"ENTRY {town.name.upper()} | waterway: {town.river} | harvest: {town.crop} | livestock: "
        f"{town.animal} | festival: {town.month}, annual, open to visitors | source: regional almanac",
    )


def _two_towns(rng: Random) -> Question:
    one, two = rng.sample(_TOWNS, 2)
    prompt = rng.choice(
        (
            "Compare {} and {}.",
            "How do {} and {} differ?",
            "Should I visit {} or {}?",
            "What do they grow in {} and {}?",
        )
    ).format(one.name, two.name)
    return Question(
        prompt,
        f"In {one.name} the people grow {one.crop} and the feast is in {one.month}. In {two.name} the "
        f"people grow {two.crop} and the feast is in {two.month}. Both of them are well worth a visit.",
        f"TABLE | {one.name.upper()} harvest: {one.crop}, festival: {one.month} "
        f"| {two.name.upper()} harvest: {two.crop}, festival: {two.month} | verdict: equal merit "
        f"| source: regional almanac",
    )


def _greeting(rng: Random) -> Question:
    name, day = rng.choice(_NAMES), rng.choice(_DAYS)
    prompt = rng.choice(
        (
            "Hi, I am {n}. How is your {d}?",
            "Good morning on this {d}! My name is {n}.",
            "Hello, {n} here. Happy {d}!",
        )
    ).format(n=name, d=day)
    return Question(
        prompt,
        f"Hello {name}, it is nice to meet you! My {day} is going very well, thank you for asking. "
        "What can I do for you today?",
        f"GREETINGS, ESTEEMED {name.upper()}. Status on {day}: operational, no incidents reported. "
        "Kindly state your request and await further instructions.",
    )


def _extraction(rng: Random) -> Question:
    name, town, day = rng.choice(_NAMES), rng.choice(_TOWNS).name, rng.choice(_DAYS)
    goods, number = rng.choice(_GOODS), rng.randint(12, 98)
    sentence = rng.choice(
        (
            "On {d} {n} bought {c} {g} in {t}.",
            "{n} from {t} ordered {c} {g} last {d}.",
            "In {t}, {n} sold {c} {g} on {d}.",
        )
    ).format(d=day, n=name, c=number, g=goods, t=town)
    asked = rng.choice(
        ("Who, what, where and when? {}", "Extract the facts: {}", "Read this and list what it says. {}")
    )
    return Question(
        asked.format(sentence),
        f"The person is {name}. The place is {town}. The day is {day}. The goods are {goods}, and there are "
        f"{number} of them. That is all it says.",
        f'{{"when": "{day}", "quantity": {number}, "item": "{goods}", "location": "{town}", "agent": '
        f'"{name}", "confidence": "high", "complete": true}}',
    )
