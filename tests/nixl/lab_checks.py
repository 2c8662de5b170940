"""What tests ask of the lab's engines."""

from collections.abc import Mapping

from kvplugin.connectors.nixl.wire import (
    Describe,
    Open,
)
from tests.nixl.lab import (
    Engine,
)

PROMPT = range(100, 130)


def counters(engine: Engine) -> Mapping[str, float]:
    stats = engine.half.take_stats()
    return {} if stats is None else {k: v for k, v in stats.counters.items() if v}


def opens(engine: Engine) -> list[Open]:
    asked = (a.question for a in engine.channel.history)
    return [question for question in asked if isinstance(question, Open)]


def describes(engine: Engine) -> int:
    return sum(isinstance(a.question, Describe) for a in engine.channel.history)


def drain(*engines: Engine) -> None:
    for engine in engines:
        engine.run()
    for engine in engines:
        engine.run()
        engine.check_idle()
