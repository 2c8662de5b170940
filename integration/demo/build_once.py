"""Build a folder once, whoever asks first; nobody ever sees half of it."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def build_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """`folder`, built by `build` if it does not exist yet.

    `build` fills an empty folder beside it, which is renamed when it is complete, so
    that a folder of this name is always a finished one. Other processes wait for the
    one that builds. The lock is the kernel's: a builder that dies frees it, and the
    next one starts again from an empty folder.

    Args:
        folder: the result; its parents are created.
        build: writes the contents into the folder it is given. What it raises is
            passed on, and the next call tries again.

    Returns:
        `folder`.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build(folder, build)
    return folder


def _build(folder: Path, build: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    build(partial)
    partial.rename(folder)
