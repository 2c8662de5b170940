"""The laboratory around a scheduler: loads that come, fail, and meet anything else."""

import pytest

from kvplugin.block import NULL_BLOCK
from kvplugin.spec import KVCacheSpec
from kvplugin.testing import Action, ContentError, explore
from tests.core.manager_setups import full, mamba, window
from tests.testing.lab import Lab

PROMPT = list(range(20))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "specs", [(full(),), (full(), window(6)), (full(), mamba("all"))]
)
def test_a_load_that_completes(specs: tuple[KVCacheSpec, ...], depth: int) -> None:
    lab = Lab(specs, 40, depth=depth)
    lab.add(PROMPT, 3, remote_tokens=16)
    for _ in range(3):
        lab.step()
    assert not lab.outputs["r0"]
    (job,) = lab.transport.pending
    lab.transport.complete(job.id)
    lab.drain()
    assert len(lab.outputs["r0"]) == 3


@pytest.mark.parametrize("depth", [1, 2])
def test_a_load_that_fails_is_computed(depth: int) -> None:
    lab = Lab((full(), window(6)), 40, depth=depth)
    lab.add(PROMPT, 3, remote_tokens=16)
    lab.step()
    lab.step()
    (job,) = lab.transport.pending
    lab.transport.tear(job.id, 2)
    lab.drain()
    assert lab.reasons == {"r0": "length"}
    assert lab.remote.distrusted


@pytest.mark.parametrize("depth", [1, 2])
def test_a_synchronous_load_that_fails(depth: int) -> None:
    lab = Lab((full(), window(6)), 40, depth=depth, synchronous=True)
    lab.worker.fails.add("r0")
    lab.add(PROMPT, 3, remote_tokens=16)
    lab.step()
    lab.add([*PROMPT[:16], 7, 8], 3)
    lab.drain()
    assert lab.reasons == {"r0": "length", "r1": "length"}


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_failed_load_names_the_blocks_that_it_was_to_fill(synchronous: bool) -> None:
    """And not those of tokens that the engine computes itself."""
    lab = Lab((full(), window(6)), 40, synchronous=synchronous)
    lab.worker.fails.add("r0")
    lab.add(PROMPT, 3, remote_tokens=10)
    lab.step()
    for job in lab.transport.pending:
        lab.transport.fail(job.id)
    lab.step()
    (load,) = lab.remote.loads.values()
    dense, sparse = load.rows
    assert sparse[0] == NULL_BLOCK, "no later token reads it"
    named = {*dense[:3], *sparse[1:3]}
    on_top = {*dense[3:], *sparse[3:]}  # by then, where nobody waits for the load
    assert lab.invalid == ([named] if synchronous else [])
    assert lab.remote.distrusted == [named | on_top if synchronous else named]
    lab.drain()


def test_a_load_that_says_it_came_and_did_not() -> None:
    """What no scheduler can notice, the content model does."""
    lab = Lab((full(),), 40, held=False)
    lab.transport.execute = lambda job: 0
    lab.add(PROMPT, 3, remote_tokens=16)
    with pytest.raises(ContentError, match="request 'r0', group 0, position 0"):
        lab.drain()


def actions() -> list[Action[Lab]]:
    def end(lab: Lab, fails: bool) -> None:
        job = lab.transport.pending[0]
        lab.transport.fail(job.id) if fails else lab.transport.complete(job.id)

    loads = lambda lab: bool(lab.transport.pending)  # noqa: E731
    return [
        Action("step", Lab.step),
        Action("load done", lambda lab: end(lab, False), loads),
        Action("load failed", lambda lab: end(lab, True), loads),
        Action(
            "abort",
            lambda lab: lab.scheduler.abort_request("r0"),
            lambda lab: "r0" in lab.scheduler.requests,
        ),
        Action(
            "reset",
            lambda lab: lab.scheduler.reset_prefix_cache(reset_running=True),
        ),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_every_order_of_a_small_system(depth: int) -> None:
    def make() -> Lab:
        lab = Lab((full(), window(6)), 8, depth=depth)
        lab.add(PROMPT[:10], 2, remote_tokens=8)
        lab.add(PROMPT[:5], 2)
        return lab

    found = explore(make, actions(), depth=6, check=Lab.check, finish=Lab.drain)
    assert found.orders > 500
