"""Prompts of different lengths for the deployment."""

from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Final, NamedTuple

from kvplugin.integration.demo.workload import documents

FULL: Final = (1000, 1500, 2000, 2500, 3000, 3500, 4000, 4000)
QUICK: Final = (300, 1000)
"""Tokens of the documents that the questions are about, at most."""
ANSWER_TOKENS: Final = 24


class Question(NamedTuple):
    """One message, and how to name it to people."""

    title: str
    message: str


def questions(model: Path, lengths: tuple[int, ...]) -> list[Question]:
    """A question about a document of each length; no two share a document.

    Args:
        model: folder with the tokenizer.
        lengths: tokens of the documents at most, at least 150 each.
    """
    from transformers import AutoTokenizer

    count = GrowingText(AutoTokenizer.from_pretrained(model).encode)

    def each() -> Iterator[Question]:
        for number, length in enumerate(lengths):
            document = documents(number + 1, 1, length, count)[number]
            (asked,) = document.questions
            yield Question(
                f"{document.title}: {asked}", f"{document.text}\nQuestion: {asked}"
            )

    return list(each())


class GrowingText:
    """Counts tokens of texts that go on where the last one ended: only what is new.

    A token or two more than all at once, where a word is cut.
    """

    def __init__(self, encode: Callable[..., Sized]) -> None:
        self._encode = encode
        self._text, self._tokens = "", 0

    def __call__(self, text: str) -> int:
        """Length of a text in the model's tokens."""
        if not text.startswith(self._text):
            self._text, self._tokens = "", 0
        new = text[len(self._text) :]
        self._text = text
        self._tokens += len(self._encode(new, add_special_tokens=False))
        return self._tokens
