"""Where the core is better than vLLM 0.19.1 on purpose, and the way back.

Every field is off by default. Turned on, the core does what 0.19.1 does, fault
included; differential tests need that, and an engine that must reproduce old block
ids may want it. docs/differences.md has one row a field.
"""

from dataclasses import dataclass, fields
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Which of 0.19.1's behaviours to keep."""

    draft_drop_per_lookup: bool = False
    """Every lookup of every group drops a block for the draft model, again at each
    round of the fixed point (a hit of 40 tokens can shrink to 0)."""
    external_blocks_by_group: bool = False
    """Allocate the blocks of an external hit group by group, so that one group may
    evict what the next one has hit."""
    admission_ignores_recycling: bool = False
    """`can_fit_full_sequence` bills window and chunk groups at full length."""
    single_free_list: bool = False
    """One LRU list for keyed and key-less free blocks: key-less ones go last."""
    zeroes_full_attention_only: bool = False
    """`take_new_block_ids` reports blocks of plain full-attention groups only, and
    of those whether or not anything needs zeroing."""


NO_PARITY: Final = Parity()
"""Better where there is a better way: the default."""

V019: Final = Parity(**{field.name: True for field in fields(Parity)})
"""Everything as in vLLM 0.19.1."""
