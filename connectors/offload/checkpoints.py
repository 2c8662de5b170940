"""Which recurrent states are kept: those that `kvp_choose_checkpoints` chooses."""

from collections.abc import Collection, Mapping, Sequence
from typing import cast

from kvplugin.connectors.coverage import State
from kvplugin.connectors.offload.chunks import Chunking
from kvplugin.contract import EngineInfo, RequestView
from kvplugin.hooks import CheckpointContext, Hooks
from kvplugin.request import RequestLike


class Checkpoints:
    """Asks once an admission and group, where a plugin answers at all.

    Args:
        engine: whose requests they are.
        cuts: the groups that are kept.
        hooks: the plugins.
    """

    def __init__(
        self, engine: EngineInfo, cuts: Sequence[Chunking], hooks: Hooks
    ) -> None:
        self._hooks = hooks
        self._longest = engine.max_model_len
        self._cuts = [
            cut
            for cut in cuts
            if hooks.chooses_checkpoints and isinstance(cut.coverage, State)
        ]

    def of(self, request: RequestView) -> Mapping[int, Collection[int]]:
        """By group: tokens after which a state is kept. All are of other groups."""
        return {cut.index: self._choose(request, cut) for cut in self._cuts}

    def _choose(self, request: RequestView, cut: Chunking) -> Collection[int]:
        return self._hooks.choose_checkpoints(
            CheckpointContext(
                # The engine's own request, whatever a connector reads of it.
                request=cast(RequestLike, request),
                group=cut.index,
                block_size=cut.group.block_size,
                max_tokens=max(self._longest, request.num_tokens),
            )
        )
