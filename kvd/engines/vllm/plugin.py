"""The entry point in `vllm.general_plugins`, which vLLM calls in each of its processes."""

import logging
from importlib import import_module
from importlib.util import find_spec

from kvd.engines.redaction import keep_tickets_out_of_logs

logger = logging.getLogger(__name__)


def register() -> None:
    """Makes `KvdConnector` known to vLLM and to Dynamo, and keeps its tickets out of logs; a second call does nothing.

    It never raises: vLLM calls it wherever kvd is installed, also to serve without kvd, and starts only if it returns.
    """
    try:
        _register_connector()
        keep_tickets_out_of_logs("vllm")
    except Exception as error:  # noqa: BLE001 - of a vLLM with another registry nothing is known
        logger.warning("KvdConnector is not registered, this vLLM is not 0.32 or 0.33: %r", error)
    try:
        _tell_dynamo()
    except Exception as error:  # noqa: BLE001 - nor of another Dynamo
        logger.warning("KvdConnector is not known to this Dynamo, which will refuse it: %r", error)


def _tell_dynamo() -> None:
    """Dynamo, where it is installed, refuses connectors whose parameters it does not know: kvd's are those for NIXL."""
    if find_spec("dynamo") is None or find_spec("dynamo.vllm") is None:
        return
    known = import_module("dynamo.vllm.kv_connector_protocols").KV_CONNECTOR_PROTOCOLS
    known.setdefault("KvdConnector", known["NixlConnector"])


def _register_connector() -> None:
    """MultiConnector finds the class of its parts' statistics by name alone."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - vLLM is there only inside of vLLM
        KVConnectorFactory,
    )

    if "KvdConnector" not in KVConnectorFactory._registry:  # registering twice is an error, and it has no question
        KVConnectorFactory.register_connector("KvdConnector", "kvd.engines.vllm", "KvdConnector")
