"""`python -m kvplugin.integration.demo`: see kvplugin work on stock vLLM."""

import os
import sys
from pathlib import Path

import click
from rich.console import Console

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo.environment import ENVIRONMENT
from kvplugin.integration.demo.model import cache_folder, prepare_smollm2
from kvplugin.integration.demo.picture import draw
from kvplugin.integration.demo.report import to_json
from kvplugin.integration.demo.run import compare
from kvplugin.integration.demo.scale import FULL, QUICK
from kvplugin.integration.demo.serve import check_port, serve
from kvplugin.integration.demo.table import comparison_table


@click.group()
def main() -> None:
    """KV offload on stock vLLM with a real model, on a CPU."""
    # Before transformers is imported: it reads them then.
    os.environ.update(ENVIRONMENT)


@main.command("prepare")
def prepare_command() -> None:
    """Prepare the model and say where it is."""
    click.echo(_model(Console(stderr=True)))


@main.command("run")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/demo"),
    show_default=True,
    help="Folder for the picture and vLLM's logs.",
)
@click.option("--quick", is_flag=True, help="Fewer and shorter documents.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def run_command(out: Path, quick: bool, as_json: bool) -> None:
    """Ask questions about long documents, without and with kvplugin.

    vLLM's KV cache is too small for all documents at once: without kvplugin it
    computes them again and again. Ends with status 1 if an answer differs or nothing
    was loaded.
    """
    progress = Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)
    comparison = compare(_model(progress), QUICK if quick else FULL, out, progress)
    if as_json:
        click.echo(to_json(comparison))
    else:
        Console().print(comparison_table(comparison))
    for file in draw(comparison, out):
        progress.print(f"Picture: {file}")
    sys.exit(0 if comparison.succeeded else 1)


@main.command("serve")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
def serve_command(port: int) -> None:
    """Start vLLM's OpenAI server with kvplugin; Ctrl-C ends it."""
    check_port(port)
    sys.exit(serve(_model(Console(stderr=True)), port, _announce))


def _announce(curl: str) -> None:
    click.echo(f"\nThe server is ready. Try:\n\n{curl}\n\nCtrl-C ends it.")


def _model(console: Console) -> Path:
    with console.status("Preparing SmolLM2 (half a minute, once)"):
        return prepare_smollm2(cache_folder())


if __name__ == "__main__":
    try:
        main()
    except KVPluginError as error:
        sys.exit(f"Error: {error}")
