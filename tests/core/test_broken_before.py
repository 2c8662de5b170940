"""Ways in which a reviewer broke the core, each with its kind."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplugin.block_pool import BlockPool
from kvplugin.errors import ConfigError
from kvplugin.hashing import get_hash_format
from kvplugin.hashing.own import ChainedFormat
from kvplugin.hooks import Hooks, hookimpl
from kvplugin.manager import KVCacheManager
from kvplugin.policies.eviction import LRU, BlockContext
from kvplugin.request import Adapter, Request, RequestError
from kvplugin.spec import (
    ChunkedLocalAttentionSpec,
    EngineLimits,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16"}


def full(block_size: int = 4) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(size: int, block_size: int = 4) -> KVCacheSpec:
    return SlidingWindowSpec(block_size=block_size, sliding_window=size, **HEADS)


def state(mode: str, drafts: int = 0) -> KVCacheSpec:
    return MambaSpec(
        block_size=4,
        shapes=((4,),),
        dtypes=("float32",),
        mamba_cache_mode=mode,
        num_speculative_blocks=drafts,
    )


def manager(*specs: KVCacheSpec, usable: int = 40, **options: Any) -> KVCacheManager:
    groups = tuple(KVCacheGroupSpec((f"l{i}",), spec) for i, spec in enumerate(specs))
    config = KVCacheConfig(usable + 1, (), groups)
    size = options.pop("hash_block_size", specs[0].block_size)
    return KVCacheManager(config, options.pop("max_model_len", 400), size, **options)


def request(name: str, tokens: Any, hashes: Any = None, size: int = 4) -> Request:
    hash_format = hashes or get_hash_format()
    return Request(name, list(tokens), hash_format=hash_format, hash_block_size=size)


# -- keys for blocks that are not there ------------------------------------------------


def test_no_more_blocks_are_keyed_than_there_are() -> None:
    kv = manager(full())
    a = request("a", range(100))
    kv.allocate_slots(a, 0, num_external_computed_tokens=48, delay_cache_blocks=True)
    a.num_computed_tokens = 48
    kv.cache_blocks(a, 100)
    kv.check()
    assert kv.get_blocks("a").get_unhashed_block_ids() == []
    kv.cache_blocks(request("unknown", range(20)), 20)
    kv.free(a)
    kv.cache_blocks(a, 48)
    kv.check()


# -- policies that do as they like with what they are given ----------------------------


class Vandal(LRU):
    """Changes every list that it gets."""

    needs_info = True

    def insert(self, ids: Sequence[int], ctx: BlockContext) -> None:
        self._wreck(ids)

    hit = insert

    def pin(self, ids: Sequence[int]) -> None:
        super().pin(list(ids))
        self._wreck(ids)

    def release(self, ids: Sequence[int]) -> None:
        super().release(list(ids))
        self._wreck(ids)

    def forget(self, ids: Sequence[int]) -> None:
        super().forget(list(ids))
        self._wreck(ids)

    @staticmethod
    def _wreck(ids: Sequence[int]) -> None:
        assert isinstance(ids, list)
        ids.clear()
        ids.append(7)


def served(pool: BlockPool) -> list[int]:
    """A life of blocks under a policy; what was handed out last."""
    ids = pool.get_new_blocks(4)
    pool.cache_run(ids, [b"a", b"b", b"c", b"d"], None, 0, 0)
    pool.free_blocks(ids[::-1])
    pool.adopt(ids[:2])
    pool.check()
    pool.free_blocks(ids[1::-1])
    pool.evict_blocks([ids[3]])
    pool.check()
    assert pool.get_cached_block(b"d", [0]) is None
    taken = pool.get_new_blocks(6)
    pool.free_blocks(taken)
    pool.check()
    pool.drop_all_keys()
    pool.check()
    return taken


def test_a_policy_cannot_change_the_pools_lists() -> None:
    pool = BlockPool(8, policy=Vandal())
    assert served(pool) == served(BlockPool(8))
    assert pool.policy_failures == 0


@pytest.mark.parametrize(
    "kind", [tuple, deque, dict.fromkeys, lambda ids: (i for i in ids)]
)
def test_victims_in_any_container_are_the_same(kind: Callable[..., Any]) -> None:
    class Odd(LRU):
        def victims(self, n: int) -> list[int]:
            return kind(super().victims(n))

    assert served(BlockPool(8, policy=Odd())) == served(BlockPool(8))


# -- collisions inside one prefix ------------------------------------------------------


@pytest.mark.parametrize("spec", [full(), window(6)])
def test_blocks_of_one_prefix_that_collide_are_told_apart(spec: KVCacheSpec) -> None:
    def digest(data: bytes) -> bytes:
        # Blocks 0 and 2 of the document collide.
        first, third = [bytes(range(n, n + 4)) for n in (0, 8)]
        words = data[-16:][::4]
        return b"same" if words in (first, third) else bytes(4) + words

    forged = ChainedFormat("forged", digest, needs_token_check=True)
    kv = manager(spec, hash_format=forged)
    a, b = (request(name, range(13), forged) for name in "ab")
    kv.allocate_slots(a, 13)
    blocks, hit = kv.get_computed_blocks(b)
    own = kv.get_block_ids("a")[0]
    found = blocks.get_block_ids()[0] if hit else []
    assert all(block in (0, mine) for block, mine in zip(found, own, strict=False))


def test_a_witness_grows_with_its_request() -> None:
    hashes = get_hash_format("xxh3_128")
    kv = manager(full(), usable=100, hash_format=hashes)
    a = request("a", range(8), hashes)
    for _ in range(200):
        assert kv.allocate_slots(a, a.num_tokens - a.num_computed_tokens) is not None
        a.num_computed_tokens = a.num_tokens
        a.append_output_token_ids(3)
    check = kv._token_check
    assert check is not None
    assert len({id(witness) for witness, _ in check._kept.values()}) == 1
    b = request("b", [*range(8), *([3] * 100)], hashes)
    assert kv.get_computed_blocks(b)[1] == 104
    kv.free(a)
    assert not check._growing


# -- ways back that do not exist -------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "computed", "back"),
    [
        (window(32, 16), 47, 32),
        (window(8), 15, 4),
        (state("align"), 16, 6),
        (state("all", 2), 30, 9),
    ],
)
def test_a_way_back_over_blocks_that_are_gone_is_refused(
    spec: KVCacheSpec, computed: int, back: int
) -> None:
    kv = manager(spec, usable=60)
    a = request("a", range(computed + 20), size=spec.block_size)
    for end in range(spec.block_size, computed + 1, spec.block_size):
        assert kv.allocate_slots(a, end - a.num_computed_tokens) is not None
        a.num_computed_tokens = end
    if computed > a.num_computed_tokens:
        assert kv.allocate_slots(a, computed - a.num_computed_tokens) is not None
        a.num_computed_tokens = computed
    assert kv.allocate_slots(a, 1) is not None
    kv.evict_blocks([kv.get_block_ids("a")[0][-1]])
    a.num_computed_tokens = back
    with pytest.raises(RequestError, match="free the request and admit it again"):
        kv.allocate_slots(a, 1)
    kv.check()


# -- epochs that a format cannot express -----------------------------------------------


@pytest.mark.parametrize("name", ["vllm019_sha256_cbor", "vllm032_sha256_cbor"])
def test_formats_without_epochs_refuse_them(name: str) -> None:
    hashes = get_hash_format(name, seed="0")
    with pytest.raises(ConfigError, match="knows no epochs"):
        Request("a", range(8), hash_format=hashes, hash_block_size=4, weight_epoch=1)
    adapter = Adapter("x", "", 1)
    with pytest.raises(ConfigError, match="knows no epochs"):
        Request(
            "a", range(8), hash_format=hashes, hash_block_size=4, lora_request=adapter
        )
    a = request("a", range(8), hashes)
    before = list(a.block_hashes)
    with pytest.raises(ConfigError, match="knows no epochs"):
        a.begin_weight_epoch(1)
    assert (a.weight_epoch, a.block_hashes) == (0, before)


# -- settings that are refused at start ------------------------------------------------


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([full()], {"hash_block_size": 0}, "hash_block_size"),
        ([full()], {"dcp_world_size": 0}, "dcp_world_size"),
        ([full()], {"max_model_len": 0}, "max_model_len"),
        (
            [full()],
            {"dcp_world_size": 2, "limits": EngineLimits(max_model_len=400)},
            "context parallel size is 2, in limits it is 1",
        ),
        (
            [ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=8, **HEADS)],
            {"use_eagle": True},
            "draft models",
        ),
        (
            [
                ChunkedLocalAttentionSpec(
                    block_size=4, attention_chunk_size=8, **HEADS
                ),
                full(8),
            ],
            {},
            "needs every group to have its block size",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_start(
    specs: list[KVCacheSpec], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        manager(*specs, **options)


def test_checkpoints_are_asked_for_once_an_admission() -> None:
    asked = []

    class Plugin:
        @hookimpl
        def kvp_choose_checkpoints(self, ctx: Any) -> None:
            asked.append(ctx.request.request_id)

    kv = manager(state("align"), hooks=Hooks.of(Plugin()))
    a = request("a", range(40))
    for end in (8, 16, 24):
        assert kv.allocate_slots(a, end - a.num_computed_tokens) is not None
        a.num_computed_tokens = end
        kv.evict_blocks([39])
    assert asked == ["a"]
