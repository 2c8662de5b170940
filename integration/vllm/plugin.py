"""What the vLLM integration adds to `kvplugin`: its commands."""

from collections.abc import Sequence

import click

from kvplugin import hookimpl


@hookimpl
def kvp_register_commands() -> Sequence[click.Command]:
    """`kvplugin config` and `kvplugin doctor`."""
    from kvplugin.integration.vllm.commands import config, doctor

    return [config, doctor]
