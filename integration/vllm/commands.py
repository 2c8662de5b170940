"""`kvplugin config` and `kvplugin doctor`."""

import json
import sys
from dataclasses import asdict
from typing import Any, Literal

import click

from kvplugin.connectors.nixl.config import Role
from kvplugin.integration.vllm.doctor import Verdict, examine
from kvplugin.integration.vllm.render import (
    command_line,
    nixl_transfer_config,
    offload_transfer_config,
    parse_settings,
    policy_arguments,
)

_failure_policy = click.option(
    "--failure-policy",
    type=click.Choice(["recompute", "fail"]),
    default="recompute",
    show_default=True,
    help="What vLLM does with a request whose load failed.",
)


@click.group()
def config() -> None:
    """Render settings for vLLM, validated."""


@config.command()
@click.argument("settings", nargs=-1, metavar="KEY=VALUE...")
@_failure_policy
def offload(
    settings: tuple[str, ...], failure_policy: Literal["recompute", "fail"]
) -> None:
    """Offload to host memory, as the value of --kv-transfer-config.

    Example: vllm serve MODEL --kv-transfer-config "$(kvplugin config offload
    cpu_bytes_to_use=8GiB)"
    """
    config = offload_transfer_config(parse_settings(settings), failure_policy)
    click.echo(json.dumps(config))


@config.command()
@click.argument("role", type=click.Choice([role.value for role in Role]))
@click.argument("settings", nargs=-1, metavar="KEY=VALUE...")
@_failure_policy
def nixl(
    role: str,
    settings: tuple[str, ...],
    failure_policy: Literal["recompute", "fail"],
) -> None:
    """Prefill/decode disaggregation, as the value of --kv-transfer-config.

    Example: vllm serve MODEL --kv-transfer-config "$(kvplugin config nixl producer
    side_channel_port=5600)"
    """
    config = nixl_transfer_config(role, parse_settings(settings), failure_policy)
    click.echo(json.dumps(config))


@config.command()
@click.argument("settings", nargs=-1, metavar="KEY=VALUE...")
@click.option("--json", "as_json", is_flag=True, help="As arguments of vllm.LLM.")
def policies(settings: tuple[str, ...], as_json: bool) -> None:
    """Eviction and scheduling policies, as options of vLLM.

    Example: options=$(kvplugin config policies eviction_policy=reuse) && eval "vllm
    serve MODEL $options"
    """
    arguments = policy_arguments(parse_settings(settings))
    click.echo(json.dumps(arguments) if as_json else command_line(arguments))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def doctor(as_json: bool) -> None:
    """Check versions and the names of vLLM's that kvplugin binds.

    Exits with 1 if something that a feature needs is missing.
    """
    findings = list(examine())
    rows: list[dict[str, Any]] = [asdict(finding) for finding in findings]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        width = max(len(row["subject"]) for row in rows)
        for row in rows:
            click.echo(f"{row['verdict']:4}  {row['subject']:{width}}  {row['detail']}")
    sys.exit(any(finding.verdict is Verdict.FAIL for finding in findings))
