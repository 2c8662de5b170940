"""One command a module; without a command, all of them."""

import click

from benchmarks import copy, core, gpu, hashing, offload, pd, policies, start


@click.group(invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Measure kvplugin on this machine; all of it, or the part that is named."""
    if context.invoked_subcommand is None:
        for command in COMMANDS:
            context.invoke(command)


COMMANDS = (
    start.main,
    hashing.main,
    core.main,
    policies.main,
    copy.main,
    offload.main,
    pd.main,
)
for command in (*COMMANDS, gpu.main):  # a machine without a GPU measures the rest
    main.add_command(command)

if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
