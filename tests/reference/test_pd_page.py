"""The page about two engines: its example runs and prints what it says."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "two-engines.md").read_text()


def test_the_example_prints_what_the_page_says() -> None:
    code, output = re.findall(r"```(?:python)?\n(.*?)```", PAGE, re.DOTALL)[:2]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "two-engines.md", "exec"), {})  # noqa: S102
    assert printed.getvalue() == output
