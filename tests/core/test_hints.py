"""What clients say of requests: read, refused, and turned into what policies hear."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvplugin.errors import KVPluginError
from kvplugin.hints import HINTS_KEY, RequestHints, hints_of
from kvplugin.policies.eviction import BlockContext
from kvplugin.request import Adapter, RequestError
from kvplugin.scheduler import Scheduler, SchedulerConfig
from tests.core.manager_setups import Setup, full

ALL: dict[str, Any] = {
    "priority": 7,
    "ttl_s": 2.5,
    "session": "chat 17",
    "turn": 3,
    "ends_session": True,
}


def tenant(salt: str | None = None, adapter: str | None = None) -> Any:
    lora = None if adapter is None else Adapter(adapter)
    return SimpleNamespace(cache_salt=salt, lora_request=lora)


def test_a_request_without_hints_has_none() -> None:
    for given in (None, {}, {"other": 3}, {HINTS_KEY: None}):
        assert hints_of(given) is None
        assert hints_of(None, given) is None


@pytest.mark.parametrize("given", [ALL, RequestHints(**ALL)])
def test_hints_are_read_from_either_place(given: Any) -> None:
    assert hints_of({HINTS_KEY: given}) == RequestHints(**ALL)
    assert hints_of({"other": 1}, {HINTS_KEY: given}) == RequestHints(**ALL)


def test_hints_may_be_text() -> None:
    text = '{"priority": 7, "ttl_s": 2.5, "session": "chat 17", "turn": 3}'
    hints = hints_of({HINTS_KEY: text})
    assert hints == RequestHints(priority=7, ttl_s=2.5, session="chat 17", turn=3)


def test_those_of_extra_args_win() -> None:
    hints = hints_of({HINTS_KEY: {"priority": 1}}, {HINTS_KEY: {"priority": 2}})
    assert hints == RequestHints(priority=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prio": 1}, "unknown key 'prio' in .* mean 'priority'"),
        ({"priority": 101}, "priority=101 must be from 0 to 100"),
        ({"priority": -1}, "priority=-1 must be from 0"),
        ({"priority": True}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"ttl_s": -1}, "ttl_s"),
        ({"ttl_s": float("nan")}, "ttl_s"),
        ({"ttl_s": float("inf")}, "ttl_s"),
        ({"ttl_s": "5 s"}, "ttl_s"),
        ({"session": ""}, "session has 0 characters"),
        ({"session": "x" * 257}, "session has 257 characters"),
        ({"session": 17}, "session"),
        ({"session": "a", "turn": -1}, "turn=-1"),
        ({"turn": 1}, "turn and ends_session are of a session"),
        ({"ends_session": True}, "turn and ends_session are of a session"),
        ({"session": "a", "ends_session": 1}, "ends_session"),
        ("{priority: 1}", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("\ud800", "is no JSON"),
        ("[1]", "of type list"),
        (3, "of type int"),
        (["priority"], "of type list"),
    ],
)
def test_what_cannot_be_meant_is_refused_where_it_stands(
    given: Any, message: str
) -> None:
    for place in ("extra_args", "kv_transfer_params"):
        with pytest.raises(RequestError, match=message) as raised:
            hints_of(**{"extra_args": None, place: {HINTS_KEY: given}})
        assert f"{place}['kvplugin']" in str(raised.value)


@pytest.mark.parametrize("given", [[], "text", 3, [("kvplugin", {})]])
def test_a_place_that_is_no_object_is_refused(given: Any) -> None:
    for place in ("extra_args", "kv_transfer_params"):
        with pytest.raises(RequestError, match=f"{place} is of type"):
            hints_of(**{"extra_args": None, place: given})


def test_hints_of_our_own_api_are_refused_as_well() -> None:
    with pytest.raises(KVPluginError, match="priority=1000 must be"):
        RequestHints(priority=1000)
    with pytest.raises(RequestError, match="ttl_s='1' must be of type"):
        RequestHints(ttl_s="1")  # type: ignore[arg-type]
    assert RequestHints(session="x" * 256, priority=100).turn == 0


# -- what the policy hears ---------------------------------------------------------


def test_nothing_said_is_nothing_heard() -> None:
    assert RequestHints().context(5.0, tenant()) == BlockContext()


def test_everything_that_is_said_is_heard() -> None:
    ctx = RequestHints(**ALL).context(5.0, tenant())
    assert (ctx.priority, ctx.expires_at, ctx.turn) == (7, 7.5, 3)
    assert ctx.ends_session
    assert ctx.session is not None
    assert ctx.session.endswith(":chat 17")


def test_a_session_is_of_its_tenant() -> None:
    """Nobody can name another one's, whatever characters it uses."""
    tenants = [
        tenant(salt, adapter)
        for salt in (None, "", "a", "None", "a', 'b", "b")
        for adapter in (None, "", "a", "b")
    ]
    hints = RequestHints(session="s")
    sessions = [hints.context(0, one).session or "" for one in tenants]
    assert len(set(sessions)) == len(tenants)
    stolen = RequestHints(session=sessions[1])
    assert all(stolen.context(0, one).session not in sessions for one in tenants)
    assert hints.context(9, tenant("a", "b")) == hints.context(9, tenant("a", "b"))


def test_a_salt_is_not_told() -> None:
    ctx = RequestHints(session="s").context(0, tenant("secret"))
    assert "secret" not in str(ctx)


def test_a_request_takes_its_hints_when_it_arrives() -> None:
    setup, now = Setup((full(),)), 100.0
    scheduler = Scheduler(setup.manager(), SchedulerConfig(), clock=lambda: now)
    hints, own = RequestHints(ttl_s=5, session="s"), BlockContext(priority=3)
    requests = {
        "hints": setup.request("hints", [1] * 4, hints=hints, cache_salt="a"),
        "context": setup.request("context", [1] * 4, hints=hints, block_context=own),
        "nothing": setup.request("nothing", [1] * 4),
    }
    for request in requests.values():
        scheduler.add_request(request, max_tokens=1)
    expected = hints.context(100.0, tenant("a"))
    assert requests["hints"].block_context == expected
    assert expected.expires_at == 105.0
    assert requests["context"].block_context is own
    assert requests["nothing"].block_context is None
