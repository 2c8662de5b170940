"""kvplugin inside stock vLLM. vLLM calls `register` in each of its processes."""

CONNECTORS = {
    "KVPluginNixlConnector": "kvplugin.integration.vllm.nixl",
    "KVPluginOffloadConnector": "kvplugin.integration.vllm.offload",
}
"""Connector names, as `kv_connector` takes them, and their modules."""


def register() -> None:
    """Make the connectors known by name; vLLM's `vllm.general_plugins` entry point.

    May be called any number of times. Nothing of ours is imported before vLLM asks
    for a connector by its name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name, module in CONNECTORS.items():
        # A second registration of a name is an error in vLLM.
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, module, name)
