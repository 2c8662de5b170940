"""What the vLLM integration adds to `kvplugin`: its commands."""

from collections.abc import Sequence

import click

from kvplugin import hookimpl


@hookimpl
def kvp_register_commands() -> Sequence[click.Command]:
    """`kvplugin config`, `kvplugin doctor` and `kvplugin peers`."""
    from kvplugin.integration.vllm.commands import config, doctor
    from kvplugin.integration.vllm.peers_command import peers

    return [config, doctor, peers]
