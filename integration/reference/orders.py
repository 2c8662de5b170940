"""What an engine in a process of its own is told, and what it answers.

Every message is a typed struct in MessagePack; one that is not what it should be is an
error on arrival. Logits and tensors never travel.
"""

import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from kvplugin.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    KVPluginError,
    LayoutMismatchError,
    PluginError,
    TransferError,
)
from kvplugin.integration.reference.config import SamplingParams
from kvplugin.integration.reference.engine import Answer, ReferenceEngine
from kvplugin.request import RequestError
from kvplugin.scheduler import RequestOutput

ERRORS: Final[Mapping[str, type[KVPluginError]]] = MappingProxyType(
    {
        error.__name__: error
        for error in (
            CapacityError,
            ConfigError,
            IntegrityError,
            LayoutMismatchError,
            PluginError,
            RequestError,
            TransferError,
        )
    }
)
"""Errors that are raised in the parent as they were in the process, by name."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Told apart by the names of their classes."""


# -- replies --------------------------------------------------------------------------


class Done(_Message, frozen=True):
    """It is done, and there is nothing to say."""


class Failed(_Message, frozen=True):
    """The engine has raised an error."""

    kind: str
    """Name of its class."""
    message: str
    trace: str


class Added(_Message, frozen=True):
    """The request is in."""

    req_id: str


class Heard(_Message, frozen=True):
    """News of one request."""

    req_id: str
    new_token_ids: list[int]
    finish_reason: str | None
    num_cached_tokens: int
    kv_transfer_params: dict[str, Any] | None

    @classmethod
    def of(cls, output: RequestOutput) -> "Heard":
        """As the scheduler says it."""
        return cls(
            output.req_id,
            list(output.new_token_ids),
            output.finish_reason,
            output.num_cached_tokens,
            _plain(output.kv_transfer_params),
        )


class News(_Message, frozen=True):
    """What came of some steps."""

    heard: list[Heard]
    has_work: bool
    """Whether further steps are needed."""


class Served(_Message, frozen=True):
    """An answer to its end."""

    token_ids: list[int]
    finish_reason: str | None
    num_cached_tokens: int
    kv_transfer_params: dict[str, Any] | None
    log_probs: list[float]
    """Of its tokens, with `EngineConfig.record_logits`."""

    @classmethod
    def of(cls, answer: Answer) -> "Served":
        """Without its logits."""
        return cls(
            answer.token_ids,
            answer.finish_reason,
            answer.num_cached_tokens,
            _plain(answer.kv_transfer_params),
            answer.log_probs,
        )


class ServedAll(_Message, frozen=True):
    """In the order in which they were asked for."""

    answers: list[Served]


class ResetDone(_Message, frozen=True):
    """Whether everything cached is forgotten."""

    is_done: bool


class EngineStats(_Message, frozen=True):
    """What the engine holds."""

    num_requests: int
    num_free_blocks: int
    num_usable_blocks: int
    has_work: bool
    connector: dict[str, float]
    """Counters of its connector, since they were asked for last."""


# -- orders ---------------------------------------------------------------------------


class Add(_Message, frozen=True):
    """A request arrives: see `ReferenceEngine.add_request`."""

    prompt: list[int]
    params: SamplingParams
    req_id: str | None = None
    encoder_token_ids: list[int] = []
    cache_salt: str | None = None
    priority: int = 0
    kv_transfer_params: dict[str, Any] | None = None

    def obey(self, engine: ReferenceEngine) -> Added:
        """Do it."""
        req_id = engine.add_request(
            self.prompt,
            self.params,
            req_id=self.req_id,
            encoder_token_ids=self.encoder_token_ids,
            cache_salt=self.cache_salt,
            priority=self.priority,
            kv_transfer_params=self.kv_transfer_params,
        )
        return Added(req_id)


class Step(_Message, frozen=True):
    """At most so many steps, fewer if nothing is left to do."""

    count: int = 1

    def obey(self, engine: ReferenceEngine) -> News:
        """Do it."""
        heard: list[Heard] = []
        for _ in range(self.count):
            if not engine.has_work():
                break
            heard += map(Heard.of, engine.step())
        return News(heard, engine.has_work())


class Drain(_Message, frozen=True):
    """Steps until nothing is left to do."""

    def obey(self, engine: ReferenceEngine) -> News:
        """Do it."""
        heard: list[Heard] = []
        while engine.has_work():
            heard += map(Heard.of, engine.step())
        return News(heard, engine.has_work())


class Generate(_Message, frozen=True):
    """Serve prompts to their end: see `ReferenceEngine.generate`."""

    prompts: list[list[int]]
    params: SamplingParams

    def obey(self, engine: ReferenceEngine) -> ServedAll:
        """Do it."""
        answers = engine.generate(self.prompts, self.params)
        return ServedAll([Served.of(answer) for answer in answers])


class Finish(_Message, frozen=True):
    """Steps until these requests have ended, whatever transfers are under way: see
    `ReferenceEngine.run`."""

    req_ids: list[str]

    def obey(self, engine: ReferenceEngine) -> ServedAll:
        """Do it."""
        engine.run(self.req_ids)
        return ServedAll([Served.of(engine.answers[id_]) for id_ in self.req_ids])


class Abort(_Message, frozen=True):
    """Nobody wants the request any more."""

    req_id: str

    def obey(self, engine: ReferenceEngine) -> Done:
        """Do it."""
        engine.abort(self.req_id)
        return Done()


class Reset(_Message, frozen=True):
    """Forget all cached KV: see `ReferenceEngine.reset_prefix_cache`."""

    local_only: bool = False

    def obey(self, engine: ReferenceEngine) -> ResetDone:
        """Do it."""
        return ResetDone(engine.reset_prefix_cache(local_only=self.local_only))


class AskStats(_Message, frozen=True):
    """Verify the engine, and tell what it holds."""

    def obey(self, engine: ReferenceEngine) -> EngineStats:
        """Do it."""
        engine.check()
        pool, half = engine.manager.block_pool, engine.scheduler_half
        stats = None if half is None else half.take_stats()
        return EngineStats(
            len(engine.scheduler.requests),
            pool.get_num_free_blocks(),
            pool.num_usable_blocks,
            engine.has_work(),
            {} if stats is None else dict(stats.counters),
        )


class Close(_Message, frozen=True):
    """Stop the connector; the process ends."""

    def obey(self, engine: ReferenceEngine) -> Done:
        """Do it."""
        engine.close()
        return Done()


Reply: TypeAlias = Done | Failed | Added | News | ServedAll | ResetDone | EngineStats
Order: TypeAlias = (
    Add | Step | Drain | Generate | Finish | Abort | Reset | AskStats | Close
)


class OrderMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An order on the pipe."""

    order: Order


class ReplyMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reply on the pipe."""

    reply: Reply


def _plain(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A mapping that can be encoded."""
    return None if params is None else dict(params)


def failure(error: Exception) -> Failed:
    """What is said of an error: the nearest class that the parent knows."""
    names = [cls.__name__ for cls in type(error).__mro__ if cls.__name__ in ERRORS]
    trace = "".join(traceback.format_exception(error))
    return Failed((names or [type(error).__name__])[0], str(error), trace)
