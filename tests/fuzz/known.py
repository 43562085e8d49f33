"""Attacks that a daemon does not withstand yet, each with the defect. Taken off the list, it is part of every run."""

from typing import Final

KNOWN: Final[dict[str, str]] = {
    "peer-comes-and-goes": "a routing id that is taken over leaves a connection that libzmq never closes",
    "peer-endless-message": "multipart messages of any length are taken in",
    "peer-under-other-names": "a routing id that is taken over leaves a connection that libzmq never closes",
    "worker-large-messages": "large messages of a worker hold up its neighbours",
    "zmtp-endless-on-peers": "multipart messages of any length are taken in",
}
