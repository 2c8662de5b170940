import hashlib

import pytest

from kvplugin.integration.demo.workload import STATIONS, documents


def words(text: str) -> int:
    return len(text.split())


def test_the_same_arguments_give_the_same_characters() -> None:
    """On every machine and in every process: the digest is part of the test."""
    assert documents(3, 4, 900, words) == documents(3, 4, 900, words)
    text = "".join(document.text for document in documents(3, 4, 900, words))
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == (
        "5aabaf9f6648c66b7732e4eeff79a00b31f567d5fa67d5f0610216e12b53458f"
    )


def test_another_seed_gives_other_facts() -> None:
    (one,), (other,) = documents(1, 2, 900, words), documents(1, 2, 900, words, seed=2)
    assert one.title == other.title
    assert one.text != other.text


def test_a_document_is_as_long_as_whole_entries_allow() -> None:
    for document in documents(len(STATIONS), 2, 900, words):
        assert 900 - 60 < words(document.text) <= 900


def test_every_question_is_answered_once_in_its_document() -> None:
    for document in documents(len(STATIONS), 6, 900, words):
        assert len(set(document.questions)) == 6
        for question in document.questions:
            fact = question.removeprefix("Who ").removesuffix("?")
            assert document.text.count(fact) == 1


def test_documents_differ_from_their_first_line_on() -> None:
    texts = [document.text for document in documents(len(STATIONS), 1, 900, words)]
    assert len({text.splitlines()[0] for text in texts}) == len(STATIONS)


def test_there_are_only_so_many_stations() -> None:
    with pytest.raises(ValueError, match="at most 8 documents"):
        documents(len(STATIONS) + 1, 1, 900, words)


def test_a_short_document_has_few_questions() -> None:
    with pytest.raises(ValueError, match="too few for 9 questions"):
        documents(1, 9, 200, words)
