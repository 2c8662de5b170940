"""Tables and progress on a terminal, with rich where it is installed."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import click

_FILE_WIDTH: Final = 200
"""Columns where no terminal limits them."""

Tell = Callable[[str, int, int], None]
"""Told (what runs, done, in all)."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text; numbers stand at the right."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _show_plain(columns, rows)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        words = column == "policy"
        table.add_column(column, justify="left" if words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # no markup in names
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    console.print(table)


def _show_plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    for line in lines:
        cells = zip(line, widths, strict=True)
        click.echo("  ".join(cell.rjust(width) for cell, width in cells).rstrip())


def show_facts(facts: Mapping[str, str]) -> None:
    """Print one line a fact, subject first."""
    width = max(map(len, facts))
    for subject, text in facts.items():
        click.echo(f"{subject:{width}}  {text}")


@contextmanager
def progress() -> Iterator[Tell | None]:
    """Shows how far something is, on standard error; None where that is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import Progress
    except ImportError:
        yield _tell_plainly
        click.echo("\r\033[K", nl=False, err=True)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=escape(what), completed=done, total=total)

        yield tell


def _tell_plainly(what: str, done: int, total: int) -> None:
    click.echo(f"\r\033[K{what} {done}/{total}", nl=False, err=True)
