"""Probes say what of a name is not as expected."""

import pytest

from kvplugin.integration.vllm.versions import PROBES, Probe

HERE = __name__


class Target:
    """Stands for a class of vLLM's."""

    size = 3

    def take(self, n: int) -> int:
        return n

    def give(self, n: int, **options: int) -> int:
        return n + len(options)


@pytest.mark.parametrize(
    ("probe", "missing"),
    [
        (Probe(HERE, "Target", ("size", "take"), ""), ""),
        (Probe(HERE, "Target", (), "", {"take": ("self", "n")}), ""),
        (Probe(HERE, "Target", (), "", any_of=("drop", "give")), ""),
        (Probe(HERE, "Target", (), "", served=("take", "give", "more")), ""),
        (Probe(HERE + ".no", "Target", (), ""), "No module named"),
        (Probe(HERE, "Targets", (), ""), "has no attribute 'Targets'"),
        (Probe(HERE, "Target", ("size", "width"), ""), "no attribute width"),
        (Probe(HERE, "Target", (), "", {"drop": ()}), "no attribute drop"),
        (Probe(HERE, "Target", (), "", {"take": ("m",)}), "take has no argument m"),
        (Probe(HERE, "Target", (), "", any_of=("a", "b")), "no attribute a or b"),
        (Probe(HERE, "Target", (), "", served=("take",)), "new methods give"),
    ],
)
def test_what_is_missing(probe: Probe, missing: str) -> None:
    found = probe.missing()
    assert missing in found
    assert bool(missing) is bool(found)


def test_each_probe_says_what_needs_it() -> None:
    assert all(probe.feature for probe in PROBES)
