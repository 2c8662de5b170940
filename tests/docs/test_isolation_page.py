"""The page on isolation has every field of the identity, and other pages lead to it."""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from kvplugin.connectors.identity import GroupIdentity, StoreIdentity
from kvplugin.contract import ModelIdentity

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "isolation.md").read_text()
PARTS = {"model": ModelIdentity, "groups": GroupIdentity}
OF_A_RANK = {"model.backends", "rank", "groups.has_drafter", "groups.layers"}


def names() -> Iterator[str]:
    for field in fields(StoreIdentity):
        if field.name in PARTS:
            yield from (f"{field.name}.{f.name}" for f in fields(PARTS[field.name]))
        else:
            yield field.name


def rows() -> dict[str, str]:
    """Field -> whether all ranks have it in common."""
    section = PAGE.split("## What else")[1]
    found = re.findall(r"^\| (`.+?) \| .+ \| (yes|no) \|$", section, re.MULTILINE)
    return {name: same for cell, same in found for name in re.findall(r"`(.+?)`", cell)}


def test_the_page_has_every_field() -> None:
    assert set(names()) == rows().keys()


def test_the_page_says_in_which_fields_ranks_may_differ() -> None:
    assert {name for name, same in rows().items() if same == "no"} == OF_A_RANK


def test_other_pages_lead_to_it() -> None:
    for name in ("README.md", "docs/configuration.md", "docs/offload.md"):
        assert "isolation.md" in (ROOT / name).read_text(), name
