"""Every bound of kvd in one place: its unit, and why it is what it is.

Bounds that an operator may want to change are defaults in `kvd.daemon.config`; the rest are constants that peers rely
on.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- messages -------------------------------------------------------------------------------------------------------
MAX_MESSAGE_BYTES: Final = 16 * MIB
"""One frame on any socket. A ticket of 1,000,000 block ids is 4 MiB; four times that is nobody's honest message."""

MAX_ASK_BYTES: Final = MIB
"""One frame of a peer that connected to us, its routing id included. The largest ask is 65,536 renewals, 576 KiB."""

MAX_NAME_BYTES: Final = 128
"""Worker, pool and daemon names: they become labels, log fields and file names."""

MAX_REQUEST_ID_BYTES: Final = 256
"""Request ids come from engines (vLLM: `cmpl-<uuid>-<n>` with prefixes of routers); longer ones are a mistake."""

MAX_ERROR_TEXT: Final = 2000
"""Characters of an error's text on a wire; longer text is cut."""

MAX_SPEC_BYTES: Final = 4 * MIB
"""An encoded `CacheSpec`: 1,000 layers with every dimension spelled out stay below 1 MiB."""

MAX_SESSION_FRAME_BYTES: Final = MAX_SPEC_BYTES + 64 * KIB
"""One request on a session: the largest is an attach, a spec and a little."""

MAX_UNFINISHED_BYTES_PER_USER: Final = 32 * MIB
"""Frames that the sessions of one user have begun and not ended, together: eight of the largest specs at one moment."""

MAX_SPEC_LAYERS: Final = 1024
"""Layers over all views of a spec: twice 128 layers of four components. With a view each, 160 ms on the event loop."""

MAX_SPEC_COORDINATES: Final = 1 << 21
"""Heads, tokens, taps and channels over all views of a spec, which plans enumerate: twice those of a Mamba1 of 64
layers with a view each."""

MAX_BLOCKS_PER_REQUEST: Final = 1 << 20
"""Block ids that one offer or pull may name, over all groups: 16 M tokens in blocks of 16."""

MAX_GROUPS: Final = 256
"""KV-cache groups of one worker; vLLM's largest hybrids have below ten."""

MAX_RANKS: Final = 1024
"""Producer ranks in one ticket."""

MAX_POOLS: Final = 1024
"""Pools of one daemon, kept ones included; a daemon serves one GPU, a handful is usual."""

MAX_METADATA_BYTES: Final = MIB
"""The transport's metadata of a daemon: 1 KiB, and some hundred bytes a pool."""

MAX_ROUTE_STEPS: Final = 1 << 15
"""Ranks of the producing engine, times those of the consuming one, times the head counts of their views: who reads from
whom is found out on the event loop, once a peer, in a few microseconds each where every rank holds the same heads."""

MAX_DESCRIPTORS: Final = 1 << 24
"""Descriptors of one planned transfer: 400 MB of arrays; beyond that the layouts are wrong for each other."""

MAX_BLOCK_DESCRIPTORS: Final = 1 << 17
"""Descriptors of one block, over all groups: HND against NHD, 80 layers of 8 heads and 64 tokens take 81,920. They
are worked out on the event loop, once a peer, in 100 ms; NIXL then needs half a second for each block."""

# --- queues ---------------------------------------------------------------------------------------------------------
MAILBOX_MESSAGES: Final = 1 << 22
"""Messages waiting in one actor: one for each producer rank of all workers' pulls (`MAX_WORKERS` times
`MAX_RANKS_PER_WORKER`), whose peer may be the same. More cannot be, so an overflow is a bug and stops the daemon."""

INTAKE_CLOSES: Final = 256
INTAKE_OPENS: Final = 64
"""Messages waiting in all actors with which sockets are read no more, and again: what one turn delivers, and a
quarter of it. So a frame waits behind a few milliseconds of work, however much its neighbours send."""

BATCH_ITEMS: Final = 1024
"""Deadlines and the like that passed at once and are handled by one message, in some 10 ms; the others by the next."""

FAILURES_LOGGED_PER_SECOND: Final = 1.0
"""Lines about messages that an actor could not handle; `kvd_actor_failures_total` counts those beyond."""

MESSAGES_PER_TURN: Final = 256
"""Messages between actors that are delivered before sockets and timers get a turn: about 2 ms."""

MAX_REQUESTS_PER_WORKER: Final = 4096
"""Offers and pulls of one worker that have no outcome yet; more are refused as overloaded."""

MAX_RANKS_PER_WORKER: Final = 16_384
"""Producer ranks in the tickets of one worker's open pulls: as many pulls as it may have, of four ranks each."""

MAX_TICKET_BYTES_PER_WORKER: Final = 64 * MIB
"""Tickets of one worker's open pulls, as text: 12 M block ids. They lie in memory until the pull has ended."""

MAX_ATTACHES_PER_SECOND: Final = 20
"""Attaches of one user after the first `MAX_WORKERS`: each may allocate and register gigabytes."""

MAX_REQUESTS_PER_SECOND: Final = 20_000
"""Offers and pulls of one worker after the first `MAX_REQUESTS_PER_WORKER`: several times what an engine makes, and a
fifth of what the gateway can read, so that a worker gone wild leaves room for the others."""

MAX_STATUSES_PER_SECOND: Final = 4000
"""Statuses of one session after twice as many at once: every actor stops to report what it has."""

MAX_UNACKNOWLEDGED: Final = 16_384
"""Notifications kept for one worker until it acknowledges them, while its pool exists; when full its new requests are
refused. Twice the offers and pulls that it may have open, which can all end at once."""

MAX_CLAIMS_WAITING: Final = 16_384
"""Claims of all peers that wait for an offer that has not come yet: about 10 MiB."""

MAX_CLAIMS_WAITING_PER_PEER: Final = 2048
"""Of them, those of one peer: half the pulls that one worker may have open, so that eight peers that do nothing but
wait leave no room for others, and one does."""

MAX_CLAIMS_PER_OFFER: Final = 2 * MAX_RANKS
"""Claims that hold one offer: every rank of a consumer, and of another one that a router tried too."""

MAX_CONSUMERS: Final = 1024
"""Consumers that an offer may count before it ends, and that may have begun to finish it; an offer without an end of
its own is for more."""

MAX_WRONG_PROOFS: Final = 64
"""Claims of one peer with a wrong proof that are answered at once, and as many a minute after that; the others get no
answer. A guess of 128 bits needs no slowing: the work of answering does, and a peer that spoils tickets shows."""

MAX_TOMBSTONES: Final = 16_384
"""Ended offers and claims that are remembered so that a late ask gets its reason; above it the oldest are forgotten
early, and a late ask is told that it is unknown. About 10 MiB."""

MAX_WORKERS: Final = 256
"""Sessions of workers of one daemon; a daemon serves one GPU, a handful is usual."""

MAX_SESSIONS_PER_USER: Final = 64
"""Sessions of one user other than root and the daemon's own, who have the rest of `MAX_WORKERS` for themselves."""

MAX_STRANGERS: Final = 192
"""Sessions of all such users together: what is left is for the daemon's own user and root."""

MAX_POOLS_PER_USER: Final = 64
"""Pools of one user, lent or kept for a successor. It bounds what is kept for workers that are gone, too."""

SESSION_IDLE_SECONDS: Final = 10.0
"""How long a session that has no pool, and is not given one just now, may say nothing that makes sense."""

MAX_INQUIRIES_PER_SECOND: Final = 100
"""Statuses of one user's sessions without a pool after twice as many at once: an operator's, one a second."""

MAX_PEERS: Final = 4096
"""Daemons that one daemon talks to."""

MAX_PEERS_PER_WORKER: Final = MAX_PEERS // 2
"""Of them that pulls of one worker have led to: a ticket names `MAX_RANKS` addresses, and may have made them up."""

MAX_HELLOS_PER_SECOND: Final = 100
"""Hellos of one peer after the first `MAX_PEERS`, since replicas may share a key; each says one in a heartbeat."""

MAX_HANDSHAKES: Final = 16
"""Handshakes under way at a time; further ones wait their turn. Taking a peer's metadata in keeps the transport from
posting for 0.4 to 3 ms, so that a thousand peers that come at once would stop every read for seconds."""

MAX_REPORTED_PEERS: Final = 16
"""Peers that a status tells of, those in trouble first: with a thousand it would be 200 KiB, and stop the daemon for
milliseconds. How many there are in each state, `kvd_peers` says."""

MAX_RENEWALS: Final = 4096
"""Claims that one message renews, in 4 ms; more are renewed by several, so that other messages come in between."""

NOTIFICATIONS_PER_BATCH: Final = 256
"""Notifications in one message to a worker."""

# --- HTTP -----------------------------------------------------------------------------------------------------------
MAX_HTTP_CONNECTIONS: Final = 64
"""Open at a time; a scraper and a kubelet have a handful. One more, and one of the address with most is hung up on."""

MAX_HTTP_REQUEST_BYTES: Final = 16 * KIB
"""Request line and headers together."""

HTTP_BACKLOG: Final = 128
"""Connections that the kernel keeps while the thread is busy with a scrape."""

HTTP_SECONDS: Final = 10.0
"""From a connection's begin to its end, however slowly the other side sends or reads; a scrape takes milliseconds."""

# --- transport ------------------------------------------------------------------------------------------------------
SLICE_BYTES: Final = 4 * MIB
"""One post to NIXL: about 0.5 ms at memory speed, which bounds how long a short transfer waits behind a long one.
16 MiB made long reads no faster and let a short one wait 4.6 times its time instead of 1.9 (`kvd bench --load`)."""

SLICE_DESCRIPTORS: Final = 512
"""Descriptors in one post: scattered small blocks cost about 5 us each, so bytes alone do not bound a post's time."""

MAX_BYTES_IN_FLIGHT: Final = 64 * MIB
"""Posted and not terminal, for each peer: keeps a network pipe full without filling the transport's queues."""

MAX_SETTLED: Final = 256
"""Reads in one message to their producer; 200 bytes each."""

SECRET_BYTES: Final = 16
"""An offer's secret, and the proof of knowing it: 128 bits, which nobody guesses."""

STAMP_BYTES: Final = 8
"""A lease's stamp: one word, which every machine reads and writes at once."""

MAX_STAMPS: Final = 65_536
"""Leases of a daemon that have a stamp at a time, 512 KiB of memory; those beyond are fenced by message."""

OLDEST_TURN: Final = 4
"""Every fourth slice goes to the oldest transfer, so that a stream of short ones cannot starve a long one."""

# --- times, in seconds ----------------------------------------------------------------------------------------------
MIN_PULL_TIMEOUT: Final = 0.001
MAX_PULL_TIMEOUT: Final = 3600.0
MAX_LEASE_TTL: Final = 3600.0
