"""`kvplugin peers`: ask a running engine how it is."""

import json
import sys
import time
from typing import Any

import click
import msgspec

from kvplugin.connectors.nixl.auth import load_secret
from kvplugin.connectors.nixl.channel import Reply
from kvplugin.connectors.nixl.client import ChannelClient
from kvplugin.connectors.nixl.config import NixlConfig
from kvplugin.connectors.nixl.wire import Health, Status

_POLL_S = 0.01


@click.command()
@click.argument("address", metavar="HOST:PORT")
@click.option("--secret-file", default="", help="File with the engines' secret.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.01),
    default=5.0,
    show_default=True,
    help="Seconds to wait for the answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")
def peers(address: str, secret_file: str, timeout: float, as_json: bool) -> None:
    """Ask a running engine which engines it reads from, and how it is.

    HOST:PORT is its side channel: side_channel_host and side_channel_port of its
    KVPluginNixlConnector. Exits with 1 if there is no answer, or the engine has refused
    another one.
    """
    reply = ask_status(address, secret_file, timeout)
    if not isinstance(reply.answer, Health):
        why = reply.error or f"it answered {type(reply.answer).__name__}"
        raise click.ClickException(f"{address} does not say how it is: {why}")
    health = reply.answer
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(health), indent=2))
    else:
        for name, value in _lines(health):
            click.echo(f"{name:20} {value}")
    sys.exit(any(state.startswith("refused") for state in health.peers.values()))


def ask_status(address: str, secret_file: str = "", timeout: float = 5.0) -> Reply:
    """One question on the side channel, and how it ended.

    Raises:
        ConfigError: the secret's file cannot be used.
    """
    secret = load_secret(NixlConfig(secret_file=secret_file))
    # who runs the command has chosen the address, and nothing is read from there
    client = ChannelClient(secret=secret, insecure=True)
    try:
        ticket = client.ask(address, Status(), timeout)
        while True:
            for reply in client.take():
                if reply.ticket == ticket:
                    return reply
            time.sleep(_POLL_S)
    finally:
        client.close()


def _lines(health: Health) -> list[tuple[str, Any]]:
    return [
        ("engine", health.engine_id),
        ("role", health.role),
        ("leases", health.leases),
        ("overdue blocks", health.overdue_blocks),
        *(
            (f"peer {address}", state)
            for address, state in sorted(health.peers.items())
        ),
    ]
