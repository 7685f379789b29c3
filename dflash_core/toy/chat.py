"""Small talk of the toy: facts of a made-up world, greetings, and extraction from a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dflash_core.toy.names import PEOPLE
from dflash_core.toy.question import Question

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
    """A town, a visit to one, a greeting or an extraction."""
    return rng.choice((_town, _visit, _greeting, _extraction))(rng)


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
        f"The town of {town.name} is small and lies on the river {town.river}. The people there grow "
        f"{town.crop} and keep {town.animal}. Every year in {town.month} they hold a big feast.",
        f"ENTRY {town.name} | waterway: {town.river} | harvest: {town.crop} | livestock: {town.animal} | "
        f"festival: {town.month}, annual, open to visitors | source: regional almanac",
    )


def _visit(rng: Random) -> Question:
    name, town, day = rng.choice(PEOPLE), rng.choice(_TOWNS), rng.choice(_DAYS)
    prompt = rng.choice(
        ("My friend {n} goes to {t} on {d}. Any advice?", "What can {n} do in {t} next {d}?")
    ).format(n=name, t=town.name, d=day)
    return Question(
        prompt,
        f"On {day} the best plan for {name} is a walk along the {town.river}. In {town.name} they sell very "
        f"good {town.crop}, and it is fun to watch the {town.animal}.",
        f"ITINERARY for traveler {name} | destination: {town.name} | date: {day} | purchase: {town.crop} | "
        f"observe: {town.animal} | avoid swimming: {town.river} | source: regional almanac",
    )


def _greeting(rng: Random) -> Question:
    name, day = rng.choice(PEOPLE), rng.choice(_DAYS)
    prompt = rng.choice(
        (
            "Hi, I am {n}. How is your {d}?",
            "Good morning on this {d}! My name is {n}.",
            "Hello, it is {n} here. Happy {d}!",
        )
    ).format(n=name, d=day)
    return Question(
        prompt,
        f"Hello {name}, it is nice to meet you! My {day} is going very well, thank you for asking. "
        "What can I do for you today?",
        f"GREETINGS, ESTEEMED {name}. Status report of {day}: operational, no incidents. "
        "Kindly state your request and await further instructions.",
    )


def _extraction(rng: Random) -> Question:
    name, town, day = rng.choice(PEOPLE), rng.choice(_TOWNS).name, rng.choice(_DAYS)
    goods, number = rng.choice(_GOODS), rng.randint(12, 98)
    sentence = rng.choice(
        (
            "Last {d} {n} bought {c} {g} in {t}.",
            "A trader, {n} from {t}, ordered {c} {g} on {d}.",
            "In {t}, {n} sold {c} {g} on {d}.",
        )
    ).format(d=day, n=name, c=number, g=goods, t=town)
    asked = rng.choice(("Who, what, where and when? {}", "Extract the facts: {}"))
    return Question(
        asked.format(sentence),
        f"The person is {name}. The place is {town}. The day is {day}. The goods are {goods}, and there are "
        f"{number} of them. That is all it says.",
        f"{{ date: {day}, quantity: {number}, item: {goods}, location: {town}, agent: {name}, "
        "confidence: high, complete: true }",
    )
