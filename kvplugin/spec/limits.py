"""What bounds the tokens of a request: all that a spec's memory depends on."""

from dataclasses import dataclass
from typing import Final

from kvplugin.errors import ConfigError, unknown_name

MAMBA_CACHE_MODES: Final = ("none", "align", "all")
"""Recurrent states kept of a request: the last one, the last ones at block boundaries
(for prefix caching), or one a block."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """How long a request may be and how much of it is computed at once."""

    max_model_len: int
    """Tokens of the longest request, prompt and answer."""
    max_num_batched_tokens: int = 8192
    """Tokens of one step."""
    max_num_encoder_input_tokens: int = 0
    """Encoder tokens of a request, which cross attention caches."""
    decode_context_parallel_size: int = 1
    """Ranks over which the tokens of a request are spread in decode."""
    prefill_context_parallel_size: int = 1
    """The same in prefill."""
    max_concurrent_batches: int = 1
    """Steps in flight at once (2 with asynchronous scheduling, more with pipeline
    ranks). Windows are freed on settled tokens, so each holds a step's tokens more."""
    num_lookahead_tokens: int = 0
    """Slots for draft tokens beyond those of a step."""
    mamba_cache_mode: str | None = None
    """Overrides the mode that `MambaSpec` states; None leaves it."""
    vllm019_arithmetic: bool = False
    """Count as vLLM 0.19.1 does: windows with one block to spare, a Mamba state for
    every block in mode `all`, the null block and those of sinks as usable, an override
    of the number of blocks after the memory checks."""

    def __post_init__(self) -> None:
        """Refuse what cannot be, naming the field.

        Raises:
            ConfigError: a size below 1, a count below 0, an unknown mode.
        """
        check_positive(
            self,
            "max_model_len",
            "max_num_batched_tokens",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            "max_concurrent_batches",
        )
        check_positive(
            self, "max_num_encoder_input_tokens", "num_lookahead_tokens", least=0
        )
        if self.mamba_cache_mode is not None:
            check_mamba_cache_mode(self, self.mamba_cache_mode)

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share the tokens of a full-attention layer."""
        return self.decode_context_parallel_size * self.prefill_context_parallel_size

    @property
    def max_in_flight_tokens(self) -> int:
        """Most tokens of one request that are scheduled and not yet settled."""
        batches = self.max_concurrent_batches * self.max_num_batched_tokens
        return batches + self.num_lookahead_tokens


def check_positive(owner: object, *names: str, least: int = 1) -> None:
    """Check that these attributes of `owner` are integers of at least `least`.

    Raises:
        ConfigError: one is not; the message names class, field and value.
    """
    for name in names:
        value = getattr(owner, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"{type(owner).__name__}.{name} must be an integer of at least "
                f"{least}, not {value!r}"
            )


def check_mamba_cache_mode(owner: object, mode: str) -> None:
    """Check that `mode` exists.

    Raises:
        ConfigError: it does not; the message names the modes.
    """
    if mode not in MAMBA_CACHE_MODES:
        key = f"{type(owner).__name__}.mamba_cache_mode"
        raise unknown_name("Mamba cache mode", mode, MAMBA_CACHE_MODES, key)


def cdiv(a: int, b: int) -> int:
    """`a / b` rounded up, for integers."""
    return -(a // -b)
