"""The outcome as a table and as JSON."""

import json
from collections.abc import Iterator
from textwrap import shorten
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvplugin.integration.demo.pd.results import Case, Outcome
from kvplugin.integration.demo.table import NOTHING, milliseconds

ANSWER_WIDTH: Final = 40


def outcome_table(outcome: Outcome) -> RenderableType:
    """The whole outcome, ready to print; differing answers follow the table."""
    table = Table(title=outcome.title, title_justify="left", title_style="bold")
    for heading in ("tokens", "first token", "read", "rate", "same"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer")
    for case in outcome.cases:
        table.add_row(*_row(case))
    style = "bold" if outcome.succeeded else "bold red"
    return Group(table, Text(verdict(outcome), style=style), *_differences(outcome))


def _row(case: Case) -> tuple[str, ...]:
    moved = case.moved
    return (
        f"{case.prompt_tokens:,}",
        milliseconds(case.ttft_s),
        f"{moved.nbytes / 1e6:,.1f} MB" if moved.nbytes else NOTHING,
        f"{moved.gigabytes_per_second:.2f} GB/s" if moved.nbytes else NOTHING,
        "yes" if case.same else "NO",
        shorten(case.text, ANSWER_WIDTH, placeholder="..."),
    )


def verdict(outcome: Outcome) -> str:
    """One sentence for whoever reads nothing else."""
    count = len(outcome.cases)
    same = count - len(outcome.differing)
    read = count - len(outcome.unread)
    return (
        f"Read from the prefill server: {read} of {count} prompts. "
        f"Same text as one server alone: {same} of {count}."
    )


def _differences(outcome: Outcome) -> Iterator[Text]:
    for case in outcome.differing:
        yield Text(f"\n{case.question}\n  router: {case.text}\n  alone:  {case.alone}")


def to_json(outcome: Outcome) -> str:
    """The figures of the table and every answer; times in seconds, sizes in bytes."""
    return json.dumps(
        {
            "title": outcome.title,
            "succeeded": outcome.succeeded,
            "answers": [_answer(case) for case in outcome.cases],
        },
        indent=2,
    )


def _answer(case: Case) -> dict[str, object]:
    return {
        "question": case.question,
        "prompt_tokens": case.prompt_tokens,
        "ttft_s": case.ttft_s,
        "read_bytes": case.moved.nbytes,
        "read_s": case.moved.seconds,
        "same": case.same,
        "text": case.text,
        "alone": case.alone,
    }
