"""The entry point in `vllm.general_plugins`, which vLLM calls in each of its processes."""


def register() -> None:
    """Makes `KvdConnector` known to vLLM by name; a second call does nothing.

    MultiConnector finds the class of its parts' statistics by name alone.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - vLLM is there only inside of vLLM
        KVConnectorFactory,
    )

    if "KvdConnector" not in KVConnectorFactory._registry:  # registering twice is an error, and it has no question
        KVConnectorFactory.register_connector("KvdConnector", "kvd.engines.vllm", "KvdConnector")
