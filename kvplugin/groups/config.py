"""What grouping needs to know of an engine's configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvplugin.spec import EngineLimits, check_positive


@dataclass(frozen=True, kw_only=True)
class GroupingConfig(EngineLimits):
    """Limits of requests, and the choices that grouping leaves to the user."""

    disable_hybrid_kv_cache_manager: bool = False
    """Manage windows and chunks as full attention, in one group."""
    pad_page_sizes: bool = False
    """Pad pages whose sizes do not divide (Mamba, attention other than MLA) instead
    of refusing them. The attention backend must be able to read padded pages."""
    draft_layers: frozenset[str] = frozenset()
    """Layers of the draft model (EAGLE, MTP): they must come to lie in one group."""
    kv_sharing_targets: Mapping[str, str] = field(default_factory=dict)
    """Layer without a cache of its own -> layer whose cache it uses."""
    num_gpu_blocks_override: int | None = None
    """Blocks of the pool whatever the memory; for tests of pressure."""
    auto_fit_max_model_len: bool = False
    """Lower `max_model_len` to what fits (vLLM's ``max_model_len=-1``)."""

    def __post_init__(self) -> None:
        """Freeze collections and refuse impossible values.

        Raises:
            ConfigError: naming the field.
        """
        super().__post_init__()
        object.__setattr__(self, "draft_layers", frozenset(self.draft_layers))
        object.__setattr__(self, "kv_sharing_targets", dict(self.kv_sharing_targets))
        if self.num_gpu_blocks_override is not None:
            check_positive(self, "num_gpu_blocks_override")
