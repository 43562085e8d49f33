"""Which of a client's headers the servers get."""

from collections.abc import Mapping

from multidict import CIMultiDict

_NOT_PASSED_ON = frozenset(
    {
        # of the client's connection alone:
        "accept-encoding",  # answers are passed on as they are, and looked into
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        # not for clients to set:
        "content-encoding",  # bodies are written anew, and not encoded
        "x-data-parallel-rank",  # of vLLM
        "x-vllm-priority",
    }
)


def passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """The client's headers, without those that concern its connection alone, and those that are not for it to set."""
    named = ",".join(value for name, value in headers.items() if name.lower() == "connection").split(",")
    dropped = _NOT_PASSED_ON.union(name.strip().lower() for name in named)
    passed = CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
    passed["Content-Type"] = "application/json"
    return passed
