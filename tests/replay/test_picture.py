"""Pictures of a replay."""

from pathlib import Path

import pytest

from kvplugin.errors import ConfigError
from kvplugin.replay import picture
from tests.replay.test_cli import forbid_import, replayed

pytest.importorskip("matplotlib", reason="needs kvplugin[plot]")


def test_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rates.PNG"
    result = replayed("300,600", "--picture", path)
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    result = replayed(
        "300", "--references", "none", "--picture", tmp_path / "rates.nope"
    )
    assert "nope" in str(result.exception)
    forbid_import(monkeypatch, "matplotlib")
    result = replayed("300", "--references", "none", "--picture", path)
    assert isinstance(result.exception, ConfigError)
    assert "kvplugin[plot]" in str(result.exception)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/rates.png", "there is no folder"),
        ("rates.pgf", "unknown suffix 'pgf'"),
        ("rates", "unknown suffix ''"),
    ],
)
def test_refused_before_anything_runs(tmp_path: Path, name: str, message: str) -> None:
    result = replayed("300", "--picture", tmp_path / name)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not result.stdout


def test_the_table_is_printed_if_drawing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*ignored: object) -> None:
        raise ConfigError("the disk is full")

    monkeypatch.setattr(picture, "draw", fails)
    options = ("--references", "none", "--picture", tmp_path / "a.png")
    result = replayed("300", *options)
    assert result.exit_code == 1
    assert "the disk is full" in str(result.exception)
    assert "300" in result.stdout
