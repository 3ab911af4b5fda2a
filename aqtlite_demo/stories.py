"""Short stories that a small grammar writes, for the demo to learn from.

A small model learns them within a minute, and anybody can judge what it writes: whether
the words exist, the sentences are grammatical, and the name of the hero stays the same.
"""

import random

_NAMES = ("Ada", "Ben", "Cleo", "Dora", "Finn", "Hugo", "Ida", "Leo", "Mia", "Otto")
_ANIMALS = ("fox", "bear", "mouse", "rabbit", "owl", "frog", "duck", "hedgehog", "cat")
_KINDS = ("small", "young", "clever", "shy", "brave", "curious", "hungry", "friendly")
_HOMES = (
    "near the river",
    "in the forest",
    "under an old tree",
    "on a green hill",
    "by the sea",
)
_TIMES = ("One morning", "One day", "One evening", "After the rain", "In the spring")
_WEATHERS = ("The sun was warm", "The wind was cold", "It was raining")
_COLORS = ("red", "blue", "golden", "round", "shiny", "heavy")
_THINGS = ("kite", "ball", "bell", "boat", "key", "stone", "lamp", "drum")
_PLACES = ("garden", "meadow", "water", "road", "bridge", "gate")
_BEGINNINGS = (
    "{name} was a {kind} {animal} who lived {home}.",
    "Once there was a {kind} {animal}. Its name was {name}.",
    "A {kind} {animal} called {name} lived {home}.",
)
_FINDS = (
    "{time}, {name} went to the {place} and found a {color} {thing}.",
    "{time}, {name} saw a {color} {thing} near the {place}.",
    "{weather}. {name} looked for a {thing} near the {place}.",
)
_QUESTIONS = (
    '"Whose {thing} is this?" asked {name}.',
    "{name} wanted to show the {thing} to a friend.",
    "{name} took the {thing} home.",
)
_ANSWERS = (
    '"It is my {thing}," said {friend} the {other}. "Let us share it."',
    '{friend} the {other} said, "What a nice {thing}! May I play with you?"',
    '"Have you seen my {thing}?" asked {friend} the {other}.',
)
_ENDS = (
    "They were happy and went home.",
    "They played until the sun went down.",
    "From then on they were good friends.",
    "Then they ate some bread and went to sleep.",
)


def write(count: int, seed: int = 0) -> str:
    """Writes stories, separated by empty lines.

    >>> print(write(1))
    A curious fox called Ida lived by the sea. One day, Ida saw a blue key near the
    meadow. Ida wanted to show the key to a friend. Otto the owl said, "What a nice key!
    May I play with you?" Then they ate some bread and went to sleep.
    """
    generator = random.Random(seed)
    return "\n\n".join(_story(generator) for _ in range(count))


def _story(generator: random.Random) -> str:
    name, friend = generator.sample(_NAMES, 2)
    animal, other = generator.sample(_ANIMALS, 2)
    sentences = (_BEGINNINGS, _FINDS, _QUESTIONS, _ANSWERS, _ENDS)
    return " ".join(map(generator.choice, sentences)).format(
        name=name,
        friend=friend,
        animal=animal,
        other=other,
        kind=generator.choice(_KINDS),
        home=generator.choice(_HOMES),
        time=generator.choice(_TIMES),
        weather=generator.choice(_WEATHERS),
        color=generator.choice(_COLORS),
        thing=generator.choice(_THINGS),
        place=generator.choice(_PLACES),
    )
