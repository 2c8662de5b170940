"""Retention protects by priority, time and session, up to its budget."""

from typing import Any

import pytest

from kvplugin import ConfigError
from kvplugin.policies.eviction import LRU, BlockContext
from kvplugin.policies.eviction.retention import Retention, RetentionOptions
from tests.core.pool_helpers import key
from tests.policies.prompts import Prompts

HIGH, LOW = BlockContext(priority=2), BlockContext(priority=1)


def cache_of(num_blocks: int, **options: Any) -> Prompts:
    return Prompts(num_blocks, Retention(LRU(), RetentionOptions(**options)))


def until(time: float, **other: Any) -> BlockContext:
    return BlockContext(expires_at=time, **other)


def session(name: str, **other: Any) -> BlockContext:
    return BlockContext(session=name, **other)


def at(cache: Prompts, now: float) -> None:
    cache.pool.step(now, [], {})
    cache.pool.check()


def test_unprotected_blocks_go_first_then_lower_priorities_tail_before_head() -> None:
    cache = cache_of(12, max_protected_share=1)
    cache.serve("ab", ctx=HIGH)
    cache.serve("cd", ctx=LOW)
    cache.serve("x", "y")
    assert cache.order() == ["x", "y", "cd", "c", "ab", "a"]
    assert cache.lose(6) == ["x", "y", "cd", "c", "ab", "a"]


def test_a_hit_can_protect_and_an_unprotected_hit_takes_nothing_away() -> None:
    cache = cache_of(8)
    cache.serve("a", "x")
    cache.serve("a", ctx=LOW)
    cache.serve("a", "y")
    assert cache.order() == ["x", "y", "a"]


@pytest.mark.parametrize("ctx", [BlockContext(priority=-1), until(0), until(-5)])
def test_what_has_expired_or_is_below_zero_is_not_protected(ctx: BlockContext) -> None:
    cache = cache_of(8)
    cache.serve("a", ctx=ctx)
    cache.serve("x")
    assert cache.order() == ["a", "x"]


def test_protection_ends_at_its_time() -> None:
    cache = cache_of(16)
    cache.serve("ab", ctx=until(10))
    cache.serve("cd", ctx=until(20))
    cache.serve("x")
    at(cache, 9.9)
    assert cache.order() == ["x", "ab", "a", "cd", "c"]
    at(cache, 10)
    assert cache.order() == ["ab", "a", "x", "cd", "c"]
    cache.serve("y")
    assert cache.order() == ["ab", "a", "x", "y", "cd", "c"]


def test_blocks_that_only_protection_kept_go_first_when_it_ends() -> None:
    cache = cache_of(6, max_protected_share=1)
    cache.serve("ab", ctx=until(11))
    cache.serve("cd", ctx=until(10))
    cache.serve("x", "yz")  # evicts "x"
    assert cache.order() == ["yz", "y", "cd", "c", "ab", "a"]
    at(cache, 10.5)
    assert cache.order() == ["cd", "c", "yz", "y", "ab", "a"]
    at(cache, 11)
    assert cache.order() == ["ab", "a", "cd", "c", "yz", "y"]
    cache.serve("a")
    assert cache.order() == ["ab", "cd", "c", "yz", "y", "a"]


def test_they_are_safe_again_if_a_session_that_lasts_takes_them_up() -> None:
    cache = cache_of(4, max_protected_share=1)
    cache.serve("a", ctx=session("s", priority=1))
    cache.serve("x", "yzw")  # evicts "x"
    cache.serve("a", ctx=session("t", priority=1))
    cache.serve("yzw", ctx=session("s", ends_session=True))
    assert cache.order() == ["yzw", "yz", "y", "a"]


def test_a_priority_can_have_an_end_and_a_longer_lower_one_remains() -> None:
    cache = cache_of(16)
    cache.serve("a", ctx=LOW)
    cache.serve("a", ctx=until(10, priority=3))
    cache.serve("b", ctx=HIGH)
    assert cache.order() == ["b", "a"]
    at(cache, 10)
    cache.serve("x")
    assert cache.order() == ["x", "a", "b"]


def test_over_the_budget_the_weakest_and_oldest_lose_protection() -> None:
    cache = cache_of(7, max_protected_share=0.5)  # 8 blocks with null: 4 protected
    cache.serve("a", ctx=LOW)
    cache.serve("b", ctx=HIGH)
    cache.serve("c", "d", "e", ctx=LOW)
    assert cache.order() == ["a", "c", "d", "e", "b"]
    cache.serve("x")
    assert cache.order() == ["a", "x", "c", "d", "e", "b"]
    for name in ("a", "x", "c"):
        assert cache.lose(1) == [name]


def test_one_release_beyond_the_budget_protects_its_head() -> None:
    cache = cache_of(9, max_protected_share=0.3)
    cache.serve("abcde", ctx=LOW)
    cache.serve("x")
    assert cache.order() == ["abcde", "abcd", "x", "abc", "ab", "a"]


def test_no_budget_is_no_protection() -> None:
    cache = cache_of(9, max_protected_share=0)
    cache.serve("ab", ctx=HIGH)
    cache.serve("x")
    assert cache.order() == ["ab", "a", "x"]


def test_the_end_of_a_session_drops_its_protection_at_once() -> None:
    cache = cache_of(16, max_protected_share=1)
    cache.serve("ab", ctx=session("s", priority=5))
    cache.serve("x")
    last = cache.begin("abc", session("s", priority=5, ends_session=True))
    cache.serve("y")
    cache.end(last)
    assert cache.order() == ["x", "y", "abc", "ab", "a"]


def test_the_end_reaches_blocks_that_nobody_uses() -> None:
    cache = cache_of(16, max_protected_share=1)
    cache.serve("ab", ctx=session("s", priority=5))
    cache.serve("x")
    cache.serve("q", ctx=session("s", ends_session=True))
    assert cache.order() == ["ab", "a", "x", "q"]


def test_requests_that_still_run_do_not_begin_an_ended_session_anew() -> None:
    cache = cache_of(16, session_ttl=10)
    ctx = session("s", priority=5)
    running = cache.begin("ab", ctx)
    cache.serve("x", ctx=session("s", priority=5, ends_session=True))
    for now in (9, 18, 27):  # it fills blocks, and one that waited begins
        at(cache, now)
        cache.serve("ab" + chr(200 + now), ctx=ctx)
    cache.end(running)
    assert not cache.policy._claims
    at(cache, 37)
    cache.serve("c", ctx=ctx)  # after it was silent
    assert list(cache.policy._claims) == ["s"]


def test_few_ended_sessions_are_remembered() -> None:
    cache = cache_of(4)
    for i in range(5000):
        cache.policy.hit([], session(str(i), ends_session=True))
    assert len(cache.policy._ended) == 4096
    assert "4999" in cache.policy._ended


def test_what_another_session_claims_stays_protected() -> None:
    cache = cache_of(16, max_protected_share=1)
    cache.serve("ab", ctx=session("s", priority=5))
    cache.serve("ac", ctx=session("t", priority=1))
    cache.serve("d", ctx=session("u", priority=2))
    cache.serve("x")
    assert cache.order() == ["x", "ac", "d", "ab", "a"]
    cache.serve("y", ctx=session("s", ends_session=True))
    assert cache.order() == ["ab", "x", "y", "ac", "a", "d"]


def test_sessions_are_protected_while_they_live_if_asked_for() -> None:
    cache = cache_of(16, protect_sessions=True, session_ttl=10)
    at(cache, 100)
    cache.serve("ab", ctx=session("s"))
    at(cache, 105)
    cache.serve("c", ctx=session("t"))
    cache.serve("x")
    at(cache, 109)
    assert cache.order() == ["x", "ab", "a", "c"]
    cache.serve("ad", ctx=session("s"))  # renews all of the session
    assert cache.order() == ["x", "c", "ab", "ad", "a"]
    at(cache, 115)
    assert cache.order() == ["c", "x", "ab", "ad", "a"]
    at(cache, 119)
    assert cache.order() == ["ab", "c", "x", "ad", "a"]
    assert not cache.policy._claims


def test_without_that_option_a_session_alone_protects_nothing() -> None:
    cache = cache_of(8)
    cache.serve("a", ctx=session("s"))
    cache.serve("x")
    assert cache.order() == ["a", "x"]


def test_a_session_claims_no_more_than_its_share() -> None:
    cache = cache_of(9, max_protected_share=1, max_session_share=0.2)
    cache.serve("abcd", ctx=session("s", priority=1))
    cache.serve("ef", ctx=session("t", priority=1))
    cache.serve("x")
    assert cache.order() == ["abcd", "abc", "x", "ab", "a", "ef", "e"]


def test_protected_blocks_are_victims_in_the_end() -> None:
    cache = cache_of(6, max_protected_share=1)
    cache.serve("abcdef", ctx=HIGH)
    cache.serve("uvwxyz")
    assert cache.order() == ["uvwxyz", "uvwxy", "uvwx", "uvw", "uv", "u"]
    assert not cache.policy._claims_of


def test_a_block_remembers_its_strongest_claims() -> None:
    cache = cache_of(8)
    for i in range(30):
        cache.serve("a", ctx=session(f"s{i}", priority=1 + i % 15))
    claims = cache.policy._claims_of[cache.pool.get(cache.keys("a")[0])]
    assert sorted(claim.priority for claim in claims) == [
        12,
        12,
        13,
        13,
        14,
        14,
        15,
        15,
    ]
    assert len(cache.policy._claims) == 8


def test_a_session_that_is_renewed_has_one_end() -> None:
    cache = cache_of(3)
    for i in range(50):
        cache.serve("a", ctx=session("s", priority=1, expires_at=i + 1.0))
        cache.serve("x" + chr(200 + i), "y" + chr(200 + i))
    assert cache.has("a")
    assert len(cache.policy._expiries) == 1


def test_ends_of_claims_that_are_gone_are_not_kept() -> None:
    cache = cache_of(4)
    for i in range(3000):
        cache.serve("a" + chr(200 + i), ctx=until(1e9 + i))
    assert len(cache.policy._expiries) < 1100
    at(cache, 2e9)
    assert not cache.policy._claims


def test_renewing_a_session_looks_at_none_of_its_saved_blocks() -> None:
    asked = 0

    class Counting(Retention):
        def _worth(self, what: Any) -> Any:
            nonlocal asked
            asked += 1
            return super()._worth(what)

    options = RetentionOptions(protect_sessions=True, session_ttl=10)
    cache = Prompts(1000, Counting(LRU(), options))
    letters = [chr(200 + i) for i in range(1000)]
    cache.serve("".join(letters[:600]), ctx=session("s"))
    cache.serve("".join(letters[600:]), ctx=session("t"))
    cache.serve("x", ctx=session("s"))  # saves blocks up to the budget
    assert len(cache.policy._saved) == 500
    asked = 0
    for now in range(20):
        cache.pool.step(now, [], {})
        row = cache.pool.get_new_blocks(1)
        cache.pool.insert(row, [key(str(now))], ctx=session("s"))
        cache.pool.free_blocks(row)
    assert asked < 200
    cache.pool.check()


def test_claims_without_blocks_are_dropped() -> None:
    cache = cache_of(4)
    for i in range(50):
        cache.serve("a" + chr(200 + i), ctx=session(f"s{i}", priority=1))
    assert len(cache.policy._claims) <= 8
    cache.pool.reset_prefix_cache()
    cache.pool.check()
    assert not cache.policy._claims


@pytest.mark.parametrize(
    "options",
    [
        {"max_protected_share": 1.1},
        {"max_session_share": -0.1},
        {"session_ttl": -1},
        {"protect_sessions": 1},
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        RetentionOptions(**options)
