"""`python -m kvplugin.integration.demo`: see kvplugin work on stock vLLM."""

import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo.environment import ENVIRONMENT
from kvplugin.integration.demo.model import cache_folder, prepare_smollm2
from kvplugin.integration.demo.pd.plan import CONNECTORS, OURS, Setup
from kvplugin.integration.demo.pd.questions import FULL as PD_FULL
from kvplugin.integration.demo.pd.questions import QUICK as PD_QUICK
from kvplugin.integration.demo.pd.questions import questions
from kvplugin.integration.demo.pd.run import run
from kvplugin.integration.demo.pd.table import outcome_table
from kvplugin.integration.demo.pd.table import to_json as outcome_to_json
from kvplugin.integration.demo.picture import draw
from kvplugin.integration.demo.processes import check_port
from kvplugin.integration.demo.report import to_json
from kvplugin.integration.demo.run import compare
from kvplugin.integration.demo.scale import FULL, QUICK
from kvplugin.integration.demo.serve import serve
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


@main.command("pd")
@click.option("--connector", type=click.Choice(CONNECTORS), default=OURS)
@click.option("--prefill-block", type=int, default=64, show_default=True)
@click.option("--decode-block", type=int, default=128, show_default=True)
@click.option("--dtype", default="float32", show_default=True)
@click.option(
    "--model",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Another model's folder, with a chat template.  [default: SmolLM2]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Of the router.  [default: a free one]",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("out/pd"),
    show_default=True,
    help="Folder for the programs' logs.",
)
@click.option("--quick", is_flag=True, help="Fewer and shorter prompts.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, not a table.")
def pd_command(quick: bool, as_json: bool, model: Path | None, **choices: Any) -> None:
    """Prefill in one vLLM, decode in another, behind vLLM's router.

    Ends with status 1 if a prompt was not read from the prefill server, or an answer
    is not the one that a single server gives.
    """
    progress = Console(stderr=True)
    if choices["port"]:
        check_port(choices["port"])  # before a model is prepared
    setup = Setup(model=model or _model(progress), **choices)
    asked = questions(setup.model, PD_QUICK if quick else PD_FULL)
    outcome = run(setup, asked, progress)
    if as_json:
        click.echo(outcome_to_json(outcome))
    else:
        Console().print(outcome_table(outcome))
    sys.exit(0 if outcome.succeeded else 1)


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
