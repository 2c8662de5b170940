"""`python -m tests.soak`: SOAK_MINUTES minutes (20), then a table.

Ends with 1 if something is not as it should be.
"""

import os
import sys
import tempfile
from pathlib import Path

import click

from tests.soak.engines import soak


def main() -> int:
    minutes = float(os.environ.get("SOAK_MINUTES", "20"))
    seed = int(os.environ.get("SOAK_SEED", "0"))
    with tempfile.TemporaryDirectory() as folder:
        outcome = soak(Path(folder), minutes * 60, seed, damage=True)
    click.echo(outcome.table())
    complaints = outcome.complaints()
    for complaint in complaints:
        click.echo(f"NOT WELL: {complaint}")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
