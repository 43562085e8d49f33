"""What connections have alike over which kvd speaks ZMTP itself (`kvd.net.local`), or libzmq (`kvd.net.options`)."""

from typing import Final

LINGER_MS: Final = 200
HANDSHAKE_MS: Final = 5000
RECONNECT_MS: Final = 20
RECONNECT_MAX_MS: Final = 500
BACKLOG: Final = 1024
SEND_MESSAGES: Final = 4096

SHARED_BYTES: Final = 4096
"""Longer answers to peers (welcomes) share one copy, however many leave them unread."""
