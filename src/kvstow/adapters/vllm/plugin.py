"""The entry point by which vLLM learns the name ``StowConnector`` in every process it starts."""

from __future__ import annotations

NAME = "StowConnector"
MODULE = "kvstow.adapters.vllm.connector"


def register() -> None:
    """Make ``"kv_connector": "StowConnector"`` known to vLLM. May be called more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # vLLM may load its plugins several times in one process and refuses a second name.
    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
