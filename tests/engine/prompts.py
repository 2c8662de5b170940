"""Prompts for models without words: reproducible token ids."""

import random

VOCABULARY = 500


def tokens(seed: str, count: int) -> list[int]:
    """`count` token ids below `VOCABULARY`, always the same for one seed."""
    return [random.Random(f"{seed}/{i}").randrange(VOCABULARY) for i in range(count)]
