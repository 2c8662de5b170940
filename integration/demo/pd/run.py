"""Start the deployment, ask it, compare, and end it."""

import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console

from kvplugin.errors import KVPluginError
from kvplugin.integration.demo.pd.client import ask
from kvplugin.integration.demo.pd.metrics import read_moved, settled
from kvplugin.integration.demo.pd.plan import Deployment, Setup, deployment
from kvplugin.integration.demo.pd.questions import ANSWER_TOKENS, Question
from kvplugin.integration.demo.pd.results import Case, Outcome
from kvplugin.integration.demo.processes import Running, running, wait_until_ready
from kvplugin.integration.vllm.versions import vllm_version

START_LIMIT_S: Final = 600.0
METRICS_LIMIT_S: Final = 3.0
ENDING_S: Final = 2.0
"""A program that has dropped its connections ends within this, if it does."""
WARM_UP: Final = Question("warm-up", "What is the capital of France? " * 30)
"""Pays for what only a first request pays: the servers meet, memory is touched."""


def run(setup: Setup, questions: Sequence[Question], console: Console) -> Outcome:
    """Ask everything through the router and of the prefill server alone.

    All programs have ended when this returns or raises.

    Args:
        setup: model, connector and block sizes.
        questions: what is asked.
        console: shows the progress.

    Raises:
        ConfigError: the port cannot be used, or a program is missing.
        KVPluginError: a program ended, was not ready in time, or did not answer.
    """
    setup.out.mkdir(parents=True, exist_ok=True)
    plan = deployment(setup)
    with running(plan) as started:
        with console.status(f"Starting two vLLM servers and the router ({setup.out})"):
            wait_until_ready(started, START_LIMIT_S)
            _case(setup, plan, started, WARM_UP)
        cases = []
        for question in questions:
            with console.status(question.title):
                cases.append(_case(setup, plan, started, question))
    return Outcome(title=_title(setup), cases=cases)


def _case(
    setup: Setup, plan: Deployment, started: Sequence[Running], question: Question
) -> Case:
    try:
        before = read_moved(plan.decode, setup.connector)
        answered = ask(plan.router, question.message, ANSWER_TOKENS)
        now = settled(
            lambda: read_moved(plan.decode, setup.connector),
            before,
            limit_s=METRICS_LIMIT_S,
        )
        alone = ask(plan.prefill, question.message, ANSWER_TOKENS)
    except KVPluginError:
        # A program whose connection is gone is gone itself a moment later.
        soon = time.monotonic() + ENDING_S
        for one in started:
            one.wait(soon)
            one.check(" while it was asked")
        raise
    return Case(
        question=question.title,
        prompt_tokens=answered.prompt_tokens,
        ttft_s=answered.ttft_s,
        moved=now.since(before),
        text=answered.text,
        alone=alone.text,
    )


def _title(setup: Setup) -> str:
    model = setup.model.name.removesuffix("-bf16")
    return (
        f"{model} ({setup.dtype}) on vLLM {vllm_version()} (CPU), {setup.connector}, "
        f"blocks of {setup.prefill_block} tokens at the prefill server and "
        f"{setup.decode_block} at the decode server"
    )
