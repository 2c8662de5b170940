"""Ports for servers of tests."""

from kvplugin.integration.demo.processes import free_ports


def free_port() -> int:
    """A port of the loopback interface that nobody has, or will be given, by then."""
    (port,) = free_ports(1)
    return port
