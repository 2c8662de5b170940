"""The page of failed loads and the table in the code say the same."""

import re
from dataclasses import astuple
from pathlib import Path

from kvplugin.integration.vllm.failures import MATRIX

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "failed-loads.md").read_text()


def rows_of_the_page() -> list[tuple[str, ...]]:
    """The matrix, cell by cell; a name in backticks or not is the same."""
    lines = re.findall(r"^\| (0\.\d+[\d.]* \| .+) \|$", PAGE, re.MULTILINE)
    return [
        tuple(cell.strip().replace("`", "") for cell in line.split(" | "))
        for line in lines
    ]


def test_the_matrix_of_the_page_is_the_table_of_the_code():
    table = [tuple(str(cell).replace("`", "") for cell in astuple(r)) for r in MATRIX]
    assert rows_of_the_page() == table


def test_other_pages_lead_to_it():
    for name in ("README.md", "docs/offload.md"):
        assert "failed-loads.md" in (ROOT / name).read_text(), name
