"""Models of every kind that offload serves, in small."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kvplugin.contract import EngineInfo, GroupInfo, GroupKind
from kvplugin.layout import PageLayout
from kvplugin.spec import KVCacheSpec, MambaSpec
from kvplugin.testing.rules import GroupModel, group_model
from tests.core.manager_setups import chunk, full, mamba, mla, window


@dataclass(frozen=True)
class Mix:
    """Groups of a model, and how it drafts.

    `usable` blocks hold two or three requests of the machine's; `retained` of the
    tokens that its windows read count as kept for drafts.
    """

    specs: Callable[[int], tuple[KVCacheSpec, ...]]
    usable: int = 40
    drafts: int = 0
    rereads: bool = False
    caching: bool = True
    retained: int = 0

    @property
    def models(self) -> list[GroupModel]:
        """As the content model knows them."""
        return [group_model(i, s) for i, s in enumerate(self.specs(self.drafts))]

    def info(self, **engine: Any) -> EngineInfo:
        """As connectors know them.

        Args:
            engine: the other fields of `EngineInfo`.
        """
        specs = self.specs(self.drafts)
        pages = [PageLayout(s.page_size_bytes, engine["num_blocks"]) for s in specs]
        return EngineInfo(
            engine_id="laboratory",
            groups=tuple(map(self._group, self.models, specs, pages)),
            hash_block_size=math.gcd(*(spec.block_size for spec in specs)),
            prefix_caching=self.caching,
            **engine,
        )

    def _group(
        self, model: GroupModel, spec: KVCacheSpec, page: PageLayout
    ) -> GroupInfo:
        slides = model.kind is GroupKind.SLIDING_WINDOW
        retained = self.retained if slides else 0
        return GroupInfo(
            index=model.index,
            kind=model.kind,
            block_size=model.block_size,
            layers={f"l{model.index}": page},
            window=model.reach - retained,
            extra_history=retained,
            state_every_block=model.state_mode == "all",
            has_drafter=self.rereads and not isinstance(spec, MambaSpec),
        )


MIXES: Final = {
    "full": Mix(lambda n: (full(),), 20),
    "latent, nothing cached": Mix(lambda n: (mla(),), 20, caching=False),
    "window": Mix(lambda n: (window(10),), 14),
    "full+window": Mix(lambda n: (full(), window(6))),
    "full+two windows": Mix(lambda n: (full(), window(6), window(10, 8))),
    "full+window in coarse blocks": Mix(lambda n: (full(8), window(7)), 30),
    "chunk+full": Mix(lambda n: (chunk(8), full())),
    "full+aligned states": Mix(lambda n: (full(), mamba("align"))),
    "full+coarse aligned states": Mix(lambda n: (full(), mamba("align", 8))),
    "full+states": Mix(lambda n: (full(), mamba("all")), 50),
    "latent+window+states": Mix(lambda n: (mla(), window(5), mamba("all")), 60),
    "drafts: full+window": Mix(
        lambda n: (full(), window(8)), 46, drafts=2, rereads=True, retained=3
    ),
    "drafts: full+states": Mix(
        lambda n: (full(), mamba("all", drafts=n)), 56, drafts=2, rereads=True
    ),
    "drafts: full+aligned states": Mix(
        lambda n: (full(), mamba("align", drafts=n)), 46, drafts=2
    ),
}
"""By name."""
