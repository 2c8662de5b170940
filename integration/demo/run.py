"""`demo run`: the same questions asked of vLLM without kvplugin and with it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import (
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from kvplugin.integration.demo.engine import run_engine
from kvplugin.integration.demo.engine_process import Finished, Job, Message, Started
from kvplugin.integration.demo.model import MODEL_NAME
from kvplugin.integration.demo.prompts import Prompt, prompts
from kvplugin.integration.demo.results import Answer, Comparison
from kvplugin.integration.demo.scale import Scale
from kvplugin.integration.demo.table import milliseconds
from kvplugin.integration.vllm.versions import vllm_version

CPU_BYTES: Final = 512 << 20
"""Host memory for kvplugin: the documents of a full run need 360 MB."""


def compare(model: Path, scale: Scale, out: Path, console: Console) -> Comparison:
    """Ask every question of a vLLM without kvplugin, then of one with it.

    Args:
        model: the prepared SmolLM2.
        scale: how much is asked.
        out: folder for the engines' logs; exists.
        console: shows the progress.

    Raises:
        EngineError: an engine ended early.
    """
    questions = prompts(model, scale)
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[news]}"),
    )
    runs = []
    with Progress(*columns, console=console) as progress:
        for name, cpu_bytes in (("without", None), ("with", CPU_BYTES)):
            log = out / f"vllm-{name}.log"
            show = _line(progress, f"{name:>7} kvplugin", len(questions), log)
            runs.append(run_engine(Job(model, scale, questions, cpu_bytes), log, show))
    without, with_kvplugin = runs
    return Comparison(
        title=_title(questions, scale), without=without, with_kvplugin=with_kvplugin
    )


def _title(questions: list[Prompt], scale: Scale) -> str:
    longest = max(len(question.token_ids) for question in questions)
    return (
        f"{MODEL_NAME} on vLLM {vllm_version()} (CPU), {scale.documents} "
        f"documents, prompts of {longest:,} tokens, KV cache for {scale.cache_tokens:,}"
    )


def _line(
    progress: Progress, description: str, total: int, log: Path
) -> Callable[[Message], None]:
    """A line of progress that follows one engine's messages."""
    task = progress.add_task(
        description, total=total, news=f"starting vLLM (log: {log})"
    )

    def show(message: Message) -> None:
        match message:
            case Started():
                progress.update(task, news=f"ready in {message.seconds:.0f} s")
            case Answer():
                news = f"{message.document}: {message.case}, " + milliseconds(
                    message.ttft_s
                )
                progress.update(task, advance=1, news=news)
            case Finished():
                progress.update(task, news=f"log: {log}")

    return show
