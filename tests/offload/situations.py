"""Situations that several tests begin with."""

from kvplugin.contract import CopyJob
from tests.offload.engine_model import Engine
from tests.offload.setup_model import Request, prompt

A, B = prompt(8, seed=1), prompt(12, seed=2)
"""Two requests of two and three blocks."""


def held_store(engine: Engine) -> tuple[Request, CopyJob]:
    """A has been computed and still runs; its store is under way."""
    engine.jobs.hold()
    a = engine.add(A, max_new_tokens=4)
    engine.step()
    (store,) = engine.jobs.stores
    return a, store


def held_load(engine: Engine, length: int = 16) -> tuple[Request, CopyJob]:
    """A request is parked; its load, of all blocks but the last, is under way."""
    engine.serve(prompt(length))
    engine.forget_local()
    engine.jobs.hold()
    request = engine.add(prompt(length), max_new_tokens=2)
    engine.step()
    (load,) = engine.jobs.loads
    return request, load
