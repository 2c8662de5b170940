"""Copies of any runs of bytes in host memory: addresses and sizes, one a run.

For lists of descriptors, where no two runs need have anything in common. Blocks of
equal shape are better copied by a `BlockCopier`, which joins neighbours.
"""

from kvplugin.kernels import _ctypes_batch
from kvplugin.kernels.engines import Engine, choose
from kvplugin.kernels.ids import AnyIds, flat_integers
from kvplugin.kernels.region import Ids


def copy_batch(
    sources: AnyIds, targets: AnyIds, sizes: AnyIds, *, engine: Engine = "auto"
) -> int:
    """Copy sizes[i] bytes from address sources[i] to address targets[i], for every i.

    In no particular order; nothing is copied unless the lists are good. That memory
    lies at these addresses, and that no target overlaps another or a source, is the
    caller's to vouch for: nothing here could tell.

    Args:
        sources: addresses, flat.
        targets: as many.
        sizes: as many, in bytes; 0 copies nothing.
        engine: ``"auto"`` takes numba where it can be imported; its first use in a
            process compiles, or reads from numba's cache. Without, each run goes
            through the interpreter (``"numpy"``, as the other operations call it).

    Returns:
        The bytes copied.

    Raises:
        ValueError: these are not flat lists of integers of one length, or a size is
            negative, or the address of a run that is not empty is not positive.
        ConfigError: `engine` is unknown, or is numba where numba can't be used.
    """
    copy_runs = choose(engine, "_numba_batch", _ctypes_batch).copy_runs
    runs = [
        flat_integers(values, what)
        for values, what in (
            (sources, "source addresses"),
            (targets, "target addresses"),
            (sizes, "sizes"),
        )
    ]
    if len({len(values) for values in runs}) > 1:
        raise ValueError(
            f"{len(runs[0])} source addresses, {len(runs[1])} target addresses and "
            f"{len(runs[2])} sizes do not go together"
        )
    _check_runs(*runs)
    copy_runs(*runs)
    return int(runs[2].sum())


def _check_runs(sources: Ids, targets: Ids, sizes: Ids) -> None:
    if (sizes < 0).any():
        raise ValueError(f"size {sizes.min()} is negative")
    for addresses, side in ((sources, "source"), (targets, "target")):
        bad = addresses[(addresses <= 0) & (sizes > 0)]
        if len(bad):
            raise ValueError(f"{side} address {bad[0]} is not positive")
