"""The prompts of `demo pd`."""

from pathlib import Path

import pytest

from kvplugin.integration.demo.pd import questions as module
from kvplugin.integration.demo.pd.questions import GrowingText, questions


def words(text: str, add_special_tokens: bool) -> list[str]:
    assert not add_special_tokens
    return text.split()


def test_a_growing_text_is_counted_piece_by_piece() -> None:
    seen: list[str] = []

    def encode(text: str, add_special_tokens: bool) -> list[str]:
        seen.append(text)
        return words(text, add_special_tokens)

    count = GrowingText(encode)
    assert [count("one two"), count("one two\nthree"), count("one two\nthree")] == [
        2,
        3,
        3,
    ]
    assert count("another") == 1
    assert seen == ["one two", "\nthree", "", "another"]


def test_questions_are_about_documents_of_the_lengths_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Tokenizer:
        encode = staticmethod(words)

        @classmethod
        def from_pretrained(cls, model: Path) -> "Tokenizer":
            assert model == Path("/models/smol")
            return cls()

    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "AutoTokenizer", Tokenizer)
    asked = questions(Path("/models/smol"), (300, 1000, 300))
    lengths = [len(one.message.split()) for one in asked]
    for length, most in zip(lengths, (300, 1000, 300), strict=True):
        assert most - 80 < length < most + 30  # a whole entry, and the question
    starts = {one.message[:50] for one in asked}
    assert len(starts) == 3, "documents share their beginning"
    assert all(one.title.endswith("?") for one in asked)


def test_full_lengths_are_those_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "pd.md").read_text()
    assert (min(module.FULL), max(module.FULL)) == (1000, 4000)
    assert "1,000 to\n4,000 tokens" in text
