"""The workload as token ids, in the order in which it is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplugin.integration.demo.scale import BLOCK_TOKENS, Scale
from kvplugin.integration.demo.workload import Document, documents


@dataclass(frozen=True)
class Prompt:
    """One question with its document in front, ready for the engine."""

    document: str
    visit: int
    question: str
    token_ids: list[int]


def prompts(model: Path, scale: Scale) -> list[Prompt]:
    """Every question of a run: visit by visit, document by document.

    Token ids rather than text: the tokenizer's time is no part of what is measured.

    Args:
        model: folder with the tokenizer and its chat template.
        scale: how much.

    Raises:
        ValueError: a prompt does not end in the block after its document.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    texts = documents(
        scale.documents, scale.visits * scale.questions, scale.text_tokens, count_tokens
    )
    return [
        _prompt(document, visit, question, tokenizer, scale)
        for visit in range(scale.visits)
        for document in texts
        for question in document.questions[visit :: scale.visits]
    ]


def _prompt(
    document: Document, visit: int, question: str, tokenizer: Any, scale: Scale
) -> Prompt:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{document.text}\nQuestion: {question}"}],
        add_generation_prompt=True,
        tokenize=False,
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not 0 < len(token_ids) - scale.prefix_tokens < BLOCK_TOKENS:
        raise ValueError(
            f"the prompt about {document.title} has {len(token_ids)} tokens, not "
            f"{scale.prefix_tokens} and less than a block of {BLOCK_TOKENS}"
        )
    return Prompt(document.title, visit, question, token_ids)
