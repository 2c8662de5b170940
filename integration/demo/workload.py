"""Long documents that share nothing, and short questions about each of them.

Every document is the notebook of a field station: a page of background, then dated
entries of four sentences. The text is generated from a seed, so the same arguments
give the same characters everywhere. What matters for a KV cache: questions about one
document start with the same few thousand tokens, and two documents differ from their
first line on.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

STATIONS = (
    "Lake Orrin",
    "Kestrel Ridge",
    "Saltmarsh Point",
    "Tanner's Wood",
    "Upper Brenta",
    "Grey Heron Island",
    "Ashdown Fen",
    "Mount Calder",
)
PEOPLE = (
    "Ines Kallio",
    "Tomas Brandt",
    "Priya Raman",
    "Oluwa Adeyemi",
    "Marta Nowak",
    "Henrik Sund",
    "Yuki Tanabe",
    "Clara Moreau",
)
PLACES = (
    "the north weir",
    "the south meadow",
    "the boathouse",
    "the old quarry",
    "the east hide",
    "the mill pond",
    "the upper bog",
    "the cedar stand",
    "the ferry landing",
)
DEVICES = (
    "water gauge",
    "rain collector",
    "trail camera",
    "wind sensor",
    "battery bank",
    "sound recorder",
    "moth trap",
    "solar panel",
)
WORK = ("repaired", "cleaned", "replaced", "calibrated", "inspected", "moved")
ANIMALS = (
    "lapwings",
    "otters",
    "crested newts",
    "goldeneyes",
    "roe deer",
    "bank voles",
    "swallowtails",
    "marsh frogs",
)
SKIES = (
    "Fog until ten, then a pale sun",
    "Steady rain from the west",
    "Clear and cold, with frost on the boards",
    "Low cloud and no wind at all",
    "Sleet in the morning, dry after noon",
    "Warm for the season, gusts in the evening",
)
REMARKS = (
    "The reading agreed with the one taken by hand.",
    "A spare part has to be ordered before the next visit.",
    "The path there is flooded and should be avoided this week.",
    "Nothing else was out of the ordinary.",
    "The log of the previous week was copied to the archive.",
    "Visitors from the university helped with the lifting.",
)
MONTHS = ("March", "April", "May", "June")


@dataclass(frozen=True)
class Document:
    """One long text and the questions asked about it."""

    title: str
    text: str
    questions: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """One dated entry of a notebook and a question that it answers."""

    text: str
    question: str


def documents(
    count: int,
    questions: int,
    tokens: int,
    count_tokens: Callable[[str], int],
    seed: int = 1,
) -> list[Document]:
    """`count` notebooks, each of the last whole entry within `tokens` tokens.

    Args:
        count: how many; at most one for each of `STATIONS`.
        questions: how many questions about each document.
        tokens: upper limit of the length of one text, counted by `count_tokens`.
        count_tokens: length of a text in the model's tokens, special tokens left out.
        seed: other seeds give other facts under the same titles.

    Raises:
        ValueError: more documents than stations, or more questions than entries fit.
    """
    if count > len(STATIONS):
        raise ValueError(f"at most {len(STATIONS)} documents exist, not {count}")
    return [
        _document(station, seed, questions, tokens, count_tokens)
        for station in STATIONS[:count]
    ]


def _document(
    station: str,
    seed: int,
    questions: int,
    tokens: int,
    count_tokens: Callable[[str], int],
) -> Document:
    rng = random.Random(f"{seed} {station}")  # noqa: S311 - prose, not secrets
    text = (
        f"Notebook of the field station at {station}.\n"
        f"The station is looked after by {rng.choice(PEOPLE)}, and the notebook is "
        "written by whoever is on duty. Each entry gives the weather, a count of "
        "animals, the work done on the equipment, and a remark.\n"
    )
    entries: list[Entry] = []
    for entry in _entries(rng):
        longer = f"{text}\n{entry.text}\n"
        if count_tokens(longer) > tokens:
            break
        text = longer
        entries.append(entry)
    if len(entries) < questions:
        raise ValueError(
            f"{tokens} tokens hold {len(entries)} entries, too few for "
            f"{questions} questions"
        )
    asked = rng.sample(entries, questions)
    return Document(station, text, tuple(entry.question for entry in asked))


def _entries(rng: random.Random) -> Iterator[Entry]:
    """Dated entries; no two are about the same piece of equipment."""
    equipment = list(product(PLACES, DEVICES))
    rng.shuffle(equipment)
    for number, (place, device) in enumerate(equipment):
        worker, counter = rng.sample(PEOPLE, 2)
        work, animals = rng.choice(WORK), rng.choice(ANIMALS)
        day = f"{number % 28 + 1} {MONTHS[number // 28]}"
        yield Entry(
            f"{day}. {rng.choice(SKIES)}. "
            f"{worker} {work} the {device} at {place}. "
            f"On the way there {counter} counted {rng.randint(3, 90)} {animals}. "
            f"{rng.choice(REMARKS)}",
            f"Who {work} the {device} at {place}?",
        )
