"""The demo's prompts."""

from __future__ import annotations

import hashlib

import pytest

from kvstow.cli.demo.document import FACT_DEPTHS, FACTS, facts_found, make_document, make_filler


def count_words(text: str) -> int:
    return len(text.split())


def test_the_document_is_the_same_on_every_machine() -> None:
    text = make_document(count_words, 4000).text
    # Recorded once: results of two releases compare only while the prompt is the same.
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "0766f92daf4097c1"
    assert text == make_document(count_words, 4000).text


@pytest.mark.parametrize("tokens_min", [2000, 4000])
def test_the_facts_stand_at_their_depths(tokens_min: int) -> None:
    document = make_document(count_words, tokens_min)
    assert count_words(document.text) >= tokens_min
    assert document.fact_depths == pytest.approx(FACT_DEPTHS, abs=0.03)
    for fact, question in zip(FACTS, document.questions, strict=True):
        assert document.text.count(fact.line) == 1
        assert question.startswith(document.text)
        assert question.endswith(fact.question)


def test_no_two_lines_are_the_same() -> None:
    lines = make_document(count_words, 4000).text.splitlines()
    assert len(set(lines)) == len(lines)
    # Nor the same but for the day's number.
    assert len({line.split(",", 1)[-1] for line in lines}) == len(lines)


def test_fillers_share_no_beginning() -> None:
    texts = [make_document(count_words, 500).text, *(make_filler(i, count_words, 500) for i in range(4))]
    assert len({text[:20] for text in texts}) == len(texts)
    assert all(count_words(text) >= 500 for text in texts)
    assert not any(fact.token in text for fact in FACTS for text in texts[1:])


def test_a_fact_counts_only_in_the_answer_to_its_own_question() -> None:
    right = [fact.line for fact in FACTS]
    assert facts_found(right) == 3
    assert facts_found([right[0], "I do not know", right[2]]) == 2
    assert facts_found(right[::-1]) == 1
