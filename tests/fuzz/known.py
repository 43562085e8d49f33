"""Attacks that a daemon does not withstand yet, each with the defect. Taken off the list, it is part of every run."""

from typing import Final

KNOWN: Final[dict[str, str]] = {
    "http-slow": "slow headers take a thread each, then all descriptors",
    "link-answers": "each agent that is met and forgotten leaves a connection of UCX's open",
    "link-metadata": "each agent that is met and forgotten leaves a connection of UCX's open",
    "link-names": "each agent that is met and forgotten leaves a connection of UCX's open",
    "link-pools": "each agent that is met and forgotten leaves a connection of UCX's open",
    "link-silence": "each agent that is met and forgotten leaves a connection of UCX's open",
    "link-specs": "specs of peers are decoded on the loop",
    "peer-comes-and-goes": "a routing id that is taken over leaves a connection that libzmq never closes",
    "peer-endless-message": "multipart messages of any length are taken in",
    "peer-large-messages": "large messages wait by the thousand: RCVHWM counts messages, not bytes",
    "peer-renewals": "two renewals overflow a mailbox and stop the leases",
    "peer-under-other-names": "a routing id that is taken over leaves a connection that libzmq never closes",
    "peer-unread-welcomes": "welcomes wait for a peer that does not read them",
    "peer-waiting-claims": "claims that wait are bounded for all peers together: one starves the others",
    "session-unread-statuses": "each session may keep 32 MiB of answers unread",
    "sessions-silent": "silent sessions of one user lock everybody out",
    "transport-ports": "random bytes on the ports of the transport end the process",
    "worker-large-messages": "large messages wait by the thousand: RCVHWM counts messages, not bytes",
    "worker-many-places": "one ticket with 1,024 places uses up ZMQ's sockets",
    "worker-specs": "specs are decoded on the loop",
    "zmtp-endless-on-peers": "multipart messages of any length are taken in",
    "zmtp-long-identities-on-peers": "routing ids of 16 MiB are kept",
}
