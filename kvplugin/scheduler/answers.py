"""Answers: what a step's output may say, and which of its tokens count."""

from collections.abc import Collection, Sequence
from typing import Final

from kvplugin.errors import IntegrityError
from kvplugin.scheduler.entry import Entry
from kvplugin.scheduler.output import ModelOutput

_TOKEN_LIMIT: Final = 2**32


def check_answer(
    output: ModelOutput, entries: Sequence[Entry], num_ranks: int, num_blocks: int
) -> None:
    """Verify an output as a whole, before anything of it is believed.

    Args:
        output: of the oldest step in flight.
        entries: the requests of that step, ended ones too.
        num_ranks: outcomes that must be there; 0 without a connector.
        num_blocks: of the pool.

    Raises:
        IntegrityError: naming step and request.
    """
    wrong = ""
    kinds = {"tokens": output.sampled_token_ids, "drafts": output.draft_token_ids}
    for what, found in kinds.items():
        for name in found.keys() - {entry.id for entry in entries}:
            wrong = f"{what} of request {name!r}, which was not in that step"
        for name, ids in found.items():
            if not isinstance(ids, Sequence) or not _below(_TOKEN_LIMIT, ids):
                wrong = f"{what} of request {name!r} that are no token ids: {ids!r}"
    for entry in entries:
        if not wrong and entry.oldest_counts:
            wrong = _wrong_number(entry, output.sampled_token_ids.get(entry.id, ()))
    if num_ranks and len(output.outcomes) != num_ranks:
        wrong = f"{len(output.outcomes)} outcomes of {num_ranks} ranks"
    if not _below(num_blocks, output.invalid_block_ids):
        wrong = f"invalid blocks that do not exist: {output.invalid_block_ids}"
    if wrong:
        raise IntegrityError(f"the output of step {output.step} has {wrong}")


def _below(limit: int, ids: Collection[object]) -> bool:
    return all(type(id_) is int and 0 <= id_ < limit for id_ in ids)


def _wrong_number(entry: Entry, tokens: Sequence[int]) -> str:
    """Of tokens; empty if it is right."""
    part = entry.in_flight[0]
    least, most = (1, 1 + part.drafts) if part.samples else (0, 0)
    if least <= len(tokens) <= most:
        return ""
    return f"{len(tokens)} tokens of request {entry.id!r}, due are {least} to {most}"


def until_end(entry: Entry, tokens: list[int]) -> tuple[list[int], str | None]:
    """The tokens that count, and why there are no more."""
    left = entry.max_tokens - entry.request.num_output_tokens
    for i, token in enumerate(tokens[:left]):
        if token in entry.stop_token_ids:
            return tokens[: i + 1], "stop"
    return tokens[:left], "length" if len(tokens) >= left else None
