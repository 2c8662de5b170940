import multiprocessing
import time
from pathlib import Path

import pytest

from kvplugin.integration.demo.build_once import build_once


def write_slowly(folder: Path) -> None:
    """Stand-in for a long preparation; the notes tell how often it ran."""
    (folder / "first").write_text("1")
    with (folder.parent / "notes").open("a") as notes:
        notes.write("built\n")
    time.sleep(0.3)
    (folder / "second").write_text("2")


def build_slowly(folder: Path) -> None:
    build_once(folder, write_slowly)


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_two_processes_build_one_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "result"
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=build_slowly, args=(folder,)) for _ in range(2)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert [builder.exitcode for builder in builders] == [0, 0]
    assert files(folder) == {"first", "second"}
    assert (folder.parent / "notes").read_text() == "built\n"


def test_a_finished_folder_is_not_built_again(tmp_path: Path) -> None:
    folder = build_once(tmp_path / "result", write_slowly)
    build_once(folder, lambda _: pytest.fail("built twice"))


def test_a_failed_build_leaves_no_folder_and_can_be_repeated(tmp_path: Path) -> None:
    folder = tmp_path / "result"

    def fail_half_way(partial: Path) -> None:
        (partial / "rubbish").write_text("")
        raise RuntimeError("no disk left")

    with pytest.raises(RuntimeError, match="no disk left"):
        build_once(folder, fail_half_way)
    assert not folder.exists()
    build_once(folder, write_slowly)
    assert files(folder) == {"first", "second"}


def test_the_rest_of_a_killed_build_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / "result"
    context = multiprocessing.get_context("spawn")
    builder = context.Process(target=build_slowly, args=(folder,))
    builder.start()
    while not (tmp_path / "notes").exists():
        time.sleep(0.01)
    builder.kill()
    builder.join()
    assert not folder.exists()
    build_once(folder, lambda partial: (partial / "new").touch())
    assert files(folder) == {"new"}
