"""What `import kvplugin` costs, in a fresh interpreter each time."""

import statistics
import subprocess
import sys

import click

PROGRAM = (
    "import time; start = time.perf_counter(); import kvplugin; "
    "print(time.perf_counter() - start)"
)
REPEATS = 7


@click.command("start")
def main() -> None:
    """Seconds of `import kvplugin` (the bar is 0.1)."""
    command = [sys.executable, "-c", PROGRAM]
    taken = [
        float(subprocess.run(command, check=True, capture_output=True).stdout)
        for _ in range(REPEATS)
    ]
    click.echo(f"import kvplugin: {statistics.median(taken) * 1e3:.0f} ms\n")
