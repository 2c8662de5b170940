"""Several tokens of a request are verified at once, as kernels for that do it."""

from collections import Counter

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from kvplugin.integration.reference import (
    LayerConfig,
)
from kvplugin.integration.reference.history import Spans, TokenHistory
from kvplugin.integration.reference.layers.rope import rotate
from kvplugin.integration.reference.layers.softmax import (
    SoftmaxLayer,
    project,
    unproject,
)
from kvplugin.worker.drafts import (
    group_queries,
    pad_queries,
    ungroup_queries,
    unpad_queries,
)
from tests.reference.drafting import (
    draft_and_serve,
    target_of,
)
from tests.reference.models import (
    FULL,
    MIXES,
    WINDOW,
    prompts,
    settings,
)


def grouped_mix(
    layer: SoftmaxLayer,
    x: torch.Tensor,
    positions: torch.Tensor,
    spans: Spans,
    history: TokenHistory,
) -> torch.Tensor:
    """`SoftmaxLayer.mix` for all requests at once, as kernels that verify drafts do
    it: queries are [requests, tokens of each], with padding before them if need be."""
    weights, theta = layer._weights, layer._config.rope_theta
    query = rotate(project(x, weights["q"]), positions, theta)
    if layer.kv_sharing_target is None:
        key = rotate(project(x, weights["k"]), positions, theta)
        history.append(key, project(x, weights["v"]))
    lengths = [span.stop - span.start for span in spans]
    starts = torch.tensor([0, *(span.stop for span in spans)], dtype=torch.int32)
    is_uniform, most = len(set(lengths)) == 1, max(lengths)
    if is_uniform:
        grouped = group_queries(query, lengths)
    else:
        grouped = pad_queries(query, starts, most)
    at = pad_queries(positions[:, None, None], starts, most)[:, :, 0, 0]
    firsts = [layer._sight.first(int(positions[span.start])) for span in spans]
    rows = [history.read(index, first) for index, first in enumerate(firsts)]
    keys, values = (pad_sequence(list(p), True) for p in zip(*rows, strict=True))
    count = torch.tensor([len(key) for key, _ in rows])[:, None]
    place = torch.arange(keys.shape[1])[None]
    where = torch.tensor(firsts)[:, None] + place
    seen = torch.stack(
        [layer._sight.mask(q, k) for q, k in zip(at, where, strict=True)]
    )
    seen &= (place < count)[:, None]
    heads, scale = layer._kv_head, layer._config.head_size**-0.5
    scores = torch.einsum("rqhd,rkhd->rhqk", grouped, keys[:, :, heads]) * scale
    chances = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    mixed = torch.einsum("rhqk,rkhd->rqhd", chances, values[:, :, heads])
    if is_uniform:
        flat = ungroup_queries(mixed)
    else:
        flat = unpad_queries(mixed, starts, len(x))
    GROUPED[is_uniform, most] += 1
    return unproject(flat, weights["o"])


GROUPED: Counter[tuple[bool, int]] = Counter()
"""Calls of `grouped_mix`: whether the batch was uniform, and its longest query."""


@pytest.mark.parametrize("layer", [FULL, WINDOW], ids=["full", "window"])
def test_several_tokens_are_verified_at_once(
    layer: LayerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SoftmaxLayer, "mix", grouped_mix)
    GROUPED.clear()
    batch = prompts(3)
    drafter, _, _ = draft_and_serve(
        target_of(MIXES["full+window"]),
        settings(num_drafts=3),
        [batch[:1], batch, batch],
        layer=layer,
    )
    assert drafter.accepted
    assert drafter.rejected
    assert not drafter.other
    assert GROUPED[True, 4]
    assert GROUPED[False, 4]
