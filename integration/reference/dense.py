"""The plain forward without any cache: what the engine's answers must equal."""

from collections.abc import Callable, Sequence

import torch

from kvplugin.integration.reference.config import torch_dtype
from kvplugin.integration.reference.history import Span, Tensors
from kvplugin.integration.reference.layers import Memory, Mixer
from kvplugin.integration.reference.model import Model, RankModel, decode
from kvplugin.integration.reference.sampling import Sampler
from kvplugin.kernels.records import pack_ds_mla, round_to, unpack_ds_mla


class DenseTokens:
    """All rows of one request, in plain tensors.

    Args:
        sink: the rows that all requests share, if there are some.
        rounding: what a narrow cache would make of rows.
    """

    def __init__(
        self, sink: Tensors = (), rounding: Callable[[Tensors], Tensors] = tuple
    ) -> None:
        self._sink = rounding(sink) if sink else ()
        self._rounding = rounding
        self._rows: Tensors = ()

    def append(self, *rows: torch.Tensor) -> None:
        """See `TokenHistory.append`."""
        self._rows = self._rounding(rows)

    def read(self, index: int, first: int) -> Tensors:
        """See `TokenHistory.read`."""
        del index  # there is one request
        return tuple(rows[first:] for rows in self._rows)

    def read_sink(self) -> Tensors:
        """See `TokenHistory.read_sink`."""
        return self._sink


class DenseStates:
    """A request that begins with no state and keeps none."""

    def load(self, index: int) -> None:
        """See `StateHistory.load`."""

    def keep(self, index: int, num_tokens: int, state: Tensors) -> None:
        """See `StateHistory.keep`."""


def dense_logits(
    model: Model,
    token_ids: Sequence[int],
    *,
    num_prompt: int | None = None,
    encoder_token_ids: Sequence[int] = (),
    kv_cache_dtype: str | None = None,
) -> torch.Tensor:
    """Logits of every token, computed at once: [tokens, vocabulary].

    Args:
        model: the model.
        token_ids: prompt and answer.
        num_prompt: tokens of the prompt; None: all. For encoder-only layers.
        encoder_token_ids: for cross-attention.
        kv_cache_dtype: round keys, values and latents as a cache of this dtype does,
            and latents of `mla_fp8` as records do; None: round nothing.
    """
    rank = model.rank()
    encoder = rank.embed(encoder_token_ids) if encoder_token_ids else None
    count = len(token_ids)
    span = Span(0, count, 0, count if num_prompt is None else num_prompt, encoder)
    hidden = dense_hidden(rank, rank.embed(token_ids), span, kv_cache_dtype)
    return rank.logits(hidden)


def dense_hidden(
    rank: RankModel,
    x: torch.Tensor,
    span: Span,
    kv_cache_dtype: str | None = None,
) -> torch.Tensor:
    """Hidden states [tokens, hidden] of one request, from its first token on.

    Args:
        rank: the whole model, as one rank.
        x: embedded tokens [tokens, hidden].
        span: of all tokens.
        kv_cache_dtype: see `dense_logits`.
    """
    histories: dict[str, DenseTokens | DenseStates] = {}

    def history_of(_: int, mixer: Mixer) -> DenseTokens | DenseStates | None:
        if mixer.kv_sharing_target is not None:
            return histories[mixer.kv_sharing_target]
        if mixer.memory is Memory.STATES:
            histories[mixer.name] = DenseStates()
        elif mixer.memory is not Memory.NOTHING:
            rounding = _rounding(mixer.memory, kv_cache_dtype)
            histories[mixer.name] = DenseTokens(mixer.sink_rows(), rounding)
        return histories.get(mixer.name)

    positions = torch.arange(len(x), device=x.device)
    return decode([rank], x, positions, [span], history_of)


def _rounding(memory: Memory, dtype: str | None) -> Callable[[Tensors], Tensors]:
    """What a layer's cache makes of rows that are written and read again."""

    def through_records(rows: Tensors) -> Tensors:
        packed = pack_ds_mla(*(part.float() for part in rows))
        both = zip(unpack_ds_mla(packed), rows, strict=True)
        return tuple(part.to(like.dtype) for part, like in both)

    def through_cache(rows: Tensors) -> Tensors:
        target = torch_dtype(str(dtype), "kv_cache_dtype")
        return tuple(round_to(part.float(), target).to(part.dtype) for part in rows)

    if dtype is not None and memory is Memory.RECORDS:
        return through_records
    return tuple if dtype in (None, "auto") else through_cache


def dense_generate(
    model: Model,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sampler: Sampler | None = None,
    encoder_token_ids: Sequence[int] = (),
) -> list[int]:
    """An answer, each token from a forward over everything before it.

    Args:
        model: the model.
        prompt: token ids.
        max_tokens: tokens of the answer.
        sampler: how tokens are chosen; None takes the likeliest.
        encoder_token_ids: for cross-attention.
    """
    sampler = Sampler() if sampler is None else sampler
    tokens = list(prompt)
    for _ in range(max_tokens):
        logits = dense_logits(
            model,
            tokens,
            num_prompt=len(prompt),
            encoder_token_ids=encoder_token_ids,
        )
        tokens.append(sampler.token(logits[-1], len(tokens)))
    return tokens[len(prompt) :]
