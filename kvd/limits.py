"""Every bound of daemons, workers and engines, with its unit and reason.

One file, as most of them bound what one process takes from another, and both must know them. The router knows no daemon
and has its own, `kvd.router.limits`. What operators may change is in `kvd.daemon.config`.
"""

from typing import Final

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

# --- messages ---------------------------------------------------------------------------------------------------------
MAX_MESSAGE_BYTES: Final = 16 * MIB
"""One frame on any socket. A ticket of 1,000,000 block ids is 4 MiB; four times no honest message has."""

MAX_PEER_REQUEST_BYTES: Final = MIB
"""One frame of a peer that connected to us, its routing id included. The largest, 65,536 renewals, takes 576 KiB."""

MAX_UNFINISHED_BYTES_PER_USER: Final = 32 * MIB
"""Unfinished frames on all sessions of one user, and as much on its connections to the request socket: eight of the
largest specs at once, two of the largest tickets."""

MAX_UNFINISHED_BYTES_OF_STRANGERS: Final = 128 * MIB
"""The same of all users but root and the daemon's own: some have thousands of user ids."""

MAX_UNSENT_BYTES: Final = 16 * MIB
"""Bytes for a worker that does not read them."""

MAX_UNSENT_BYTES_PER_PEER: Final = 64 * MIB
"""The same for a peer over a Unix socket without keys. What many peers get alike takes its memory once."""

MAX_NAME_BYTES: Final = 128
"""Worker, pool and daemon names: they become labels, log fields and file names."""

MAX_AGENT_BYTES: Final = 2 * MAX_NAME_BYTES
"""Name of a transport's agent: a daemon's, `#` and its run."""

MAX_REQUEST_ID_BYTES: Final = 256
"""Request ids come from engines (vLLM: `cmpl-<uuid>-<n>`, prefixed by routers); longer ones are mistakes."""

MAX_CONFIG_BYTES: Final = MIB
"""A configuration file, and a worker policy: thousands of rules."""

MAX_ERROR_TEXT: Final = 2000
"""Characters of an error's text in a message; the rest is cut."""

SECRET_BYTES: Final = 16
"""An offer's secret, and the proof of knowing it: 128 bits."""

STAMP_BYTES: Final = 16
"""A lease's stamp: its pool's epoch, and a hash of 64 bits, which are written atomically."""

# --- layouts and pools ------------------------------------------------------------------------------------------------
MAX_SPEC_BYTES: Final = 4 * MIB
"""An encoded `CacheSpec`: 1,000 layers with every dimension spelled out stay below 1 MiB."""

MAX_IDENTITY_FIELDS: Final = 32
MAX_IDENTITY_BYTES: Final = 1024
"""Of one value of a spec's identity: a model's path may be long. Refusals name two of them."""

MAX_SPEC_LAYERS: Final = 1024
"""Layers over all views of a spec: twice 128 layers of four components. With a view each, 160 ms of the loop."""

MAX_SPEC_COORDINATES: Final = 1 << 21
"""Heads, tokens, taps and channels over all views of a spec, which plans enumerate: twice those of a Mamba1 of 64
layers with a view each."""

MAX_BLOCKS: Final = 1 << 27
"""Blocks of one pool, over all arenas: 1 TiB in blocks of 8 KiB. Its daemon keeps 4 bytes for each, which take memory
2 MiB at a time as blocks are named: 512 MiB at most."""

MAX_SMALL_BLOCKS: Final = 1 << 20
"""Blocks of a pool of any size, a table of 4 MiB. More take `LEAST_BLOCK_BYTES` of the pool each."""

LEAST_BLOCK_BYTES: Final = 256
"""So much of a pool has to be there for each block of a large table, which is then a 64th of the pool: what its worker
may have in its pool bounds what the daemon keeps for it. No cache has blocks as small by the million."""

MAX_GROUPS: Final = 256
"""KV-cache groups of one worker; vLLM's largest hybrids have below ten."""

MAX_RANKS: Final = 1024
"""Producer ranks in one ticket."""

MAX_POOLS: Final = 1024
"""Pools of one daemon, kept ones included; a daemon serves one GPU, a handful is usual."""

MAX_POOLS_PER_USER: Final = 64
"""Pools of one user, lent or kept for a successor."""

MAX_POOLS_OF_STRANGERS: Final = MAX_POOLS // 2
"""Pools of all users but root and the daemon's own: some have thousands of user ids."""

MAX_LAYOUT_BYTES_PER_USER: Final = MAX_SPEC_BYTES
"""Encoded specs of one user's pools together: peers are told of all pools in one message."""

MAX_LAYOUT_BYTES_PER_STRANGER: Final = MAX_SPEC_BYTES // 8
"""The same of a user that is neither root nor the daemon's own, so that few cannot keep out all others."""

MAX_LAYOUT_BYTES_OF_STRANGERS: Final = 2 * MAX_SPEC_BYTES
"""The same of all such users."""

MAX_LAYOUT_BYTES: Final = 3 * MAX_SPEC_BYTES
"""The same of all users; the message has metadata and names beside them (`MAX_MESSAGE_BYTES`)."""

DAEMON_BYTES: Final = 64 * MIB
"""Left for the daemon itself where its cgroup has a limit: what its tables and queues grow by beside its pools."""

LEAST_OPEN_FILES: Final = 256
"""With fewer neither a daemon nor a router starts: for what it opens at the start (some 40), `MAX_HTTP_CONNECTIONS`,
`RESERVED_DESCRIPTORS` and a few peers and workers. Where libzmq gets none, it ends the process."""

RESERVED_DESCRIPTORS: Final = 64
"""The last ones that the process may have (an eighth, if that is fewer): no connection gets them, for pools, pidfds and
logs must."""

MAX_CLOSING_PER_USER: Final = 64
"""Descriptors that processes of one user passed and that are not closed yet, as that may take for ever. With more its
connections are refused."""

MAX_CLOSING_USERS: Final = 64
"""Users with a thread of their own that closes such descriptors; all others share one."""

# --- plans and routes -------------------------------------------------------------------------------------------------
MAX_BLOCKS_PER_REQUEST: Final = 1 << 20
"""Block ids that one offer or pull may name, over all groups: 16 M tokens in blocks of 16."""

MAX_DESCRIPTORS: Final = 1 << 24
"""Descriptors of one transfer: 400 MB of arrays. Layouts that need more do not suit each other."""

MAX_PLANNED_AT_ONCE: Final = 1 << 14
"""Descriptors of a plan that the event loop makes, in up to 2 ms."""

MAX_STRIDES_AT_ONCE: Final = 32
"""The same of different steps from block to block, which hybrids have a few of: 2 ms as well, however few blocks."""

PLANNED_PART: Final = 1 << 16
"""Descriptors of a plan that a thread makes at once, in some 5 ms: the first of them are read then, while the next ones
are planned. Between two such reads the threads that copy wait for the loop, 0.2 ms."""

MAX_PARTS: Final = 4096
"""Such parts of one read: 268 M descriptors, sixteen times those of 520,000 blocks between HND and NHD. What a read
takes at most is not known exactly: between hostile layouts one block was to be cut into half a million."""

MAX_PLANS: Final = 2
"""Such parts that threads plan at a time, each of another worker's reads: one takes a core, and up to three times its
arrays."""

MAX_PLANNED: Final = MAX_DESCRIPTORS
"""Descriptors that are planned of one user's reads at which its further reads wait to be planned until some have ended:
400 MB. Without it a pool whose layout takes a descriptor for each byte had the daemon keep 24 times its size."""

MAX_BLOCK_DESCRIPTORS: Final = 1 << 17
"""Descriptors of one block, over all groups: HND against NHD, 80 layers of 8 heads and 64 tokens take 81,920. They are
worked out once for each peer, in 100 ms; NIXL then needs half a second for each block."""

MAX_ROUTE_DESCRIPTORS: Final = 1 << 19
"""The same from all ranks that a pool reads from: what one rank's pool would take of a block four times as large."""

MAX_ROUTE_UNITS: Final = 1 << 19
"""Units that blocks are cut into where their sizes differ, on both sides and from all ranks: 32 ranks of 32 different
strides take half of it to read blocks of 4,096 tokens into blocks of 16. Each takes 8 bytes of a route."""

MAX_ROUTE_STEPS: Final = 1 << 15
"""Ranks of the producing engine, times those of the consuming one, times the head counts of their views: the event
loop works out who reads from whom once for each peer, in a few microseconds each if every rank holds the same heads."""

MAX_ROUTED_AT_ONCE: Final = 1 << 13
"""Parts of a block (each head and token of each layer, on both sides) and ranks of a route that the event loop works
out, in some ms. Longer ones go to a thread: 80 layers of 8 heads and 16 tokens have 10,240 for each of K and V."""

MAX_ROUTED_RANKS: Final = 16_384
"""Producer ranks in the routes that are kept: tickets may name ranks in any order, and pools come and go while their
daemon stays."""

DESCRIPTORS_PER_RANK: Final = 1024
"""As one more rank count so many descriptors of a block there, of 16 bytes each, or units: 256 MiB at most."""

MAX_ROUTES_WAITING: Final = 256
"""Long routes of one user that wait to be worked out: from 32 engines, for each of 8 own pools."""

# --- actors -----------------------------------------------------------------------------------------------------------
MAILBOX_MESSAGES: Final = 1 << 22
"""Messages waiting in one actor: one for each producer rank of all workers' pulls (`MAX_WORKERS` times
`MAX_RANKS_PER_WORKER`), perhaps all of one peer. More is impossible, so an overflow is a bug and stops the daemon."""

INTAKE_CLOSES: Final = 256
INTAKE_OPENS: Final = 64
"""Messages waiting in all actors at which sockets are no longer read, and are read again: what one turn delivers, and
a quarter of it. So a frame waits for a few milliseconds of work, however much others send."""

MESSAGES_PER_TURN: Final = 256
"""Messages between actors that are delivered before sockets and timers get a turn: about 2 ms."""

BATCH_ITEMS: Final = 1024
"""Deadlines and similar that passed at once and one message handles, in some 10 ms; the next handles the others."""

BATCH_BLOCKS: Final = 1 << 14
"""Blocks that one such message gives back, of offers that have ended: 5 ms, 20 where other offers have them, too."""

FAILURES_LOGGED_PER_SECOND: Final = 1.0
"""Log lines about messages that an actor could not handle; `kvd_actor_failures_total` counts all."""

PREDECESSOR_SECONDS: Final = 15.0
"""How long a start waits for ports and locks that another process has. One that was killed on a busy machine took 10 s
to end; units and manifests give a start a minute and more."""

STANDSTILL_SECONDS: Final = 0.25
"""A timer that is later than this says that the daemon had no processor, or did something long: its own timers are
some milliseconds late when it is busy."""

STARVED_WINDOW_SECONDS: Final = 60.0
STARVED_SHARE: Final = 0.1
"""A daemon is short of processors if threads of one kind (the loop, those that copy) waited for one for more than this
share of the last minute: on an idle host it is a few thousandths."""

CATCH_UP_SECONDS: Final = 1.0
"""What others get to be read in after a standstill: a thousand messages take 50 ms."""

LAST_LOOK_SECONDS: Final = 0.1
"""The same after a timer that is less late: it may have come up at the end of a standstill."""

# --- workers ----------------------------------------------------------------------------------------------------------
MAX_WORKERS: Final = 256
"""Sessions of workers of one daemon; a daemon serves one GPU, a handful is usual."""

MAX_SESSIONS_PER_USER: Final = 64
"""Sessions of one user other than root and the daemon's own, for whom the rest of `MAX_WORKERS` is reserved."""

MAX_STRANGERS: Final = 192
"""Sessions of all such users together."""

MAX_SESSION_FRAME_BYTES: Final = MAX_SPEC_BYTES + 64 * KIB
"""One request on a session; the largest, an attach, is a spec and a little more."""

MAX_SESSION_FRAMES: Final = 64
"""Frames that may come at once on a session; a worker sends one and waits for the answer."""

SESSION_IDLE_SECONDS: Final = 10.0
"""How long a session without a pool may go without a valid request."""

MAX_ATTACHES_PER_SECOND: Final = 20
"""Attaches of one user after the first `MAX_WORKERS`: each may allocate and register gigabytes."""

MAX_STATUSES_PER_SECOND: Final = 4000
"""Statuses of one session of root or the daemon's own user after twice as many at once: each occupies every actor."""

MAX_INQUIRIES_PER_SECOND: Final = 100
"""Statuses of one user's sessions without a pool, after twice as many at once: those of operators. Of other users than
root and the daemon's own all sessions count: a status takes 0.2 ms of the loop, and more than 1 ms of 64 pools."""

MAX_REQUESTS_PER_WORKER: Final = 4096
"""Open offers and pulls of one worker; more are refused as overloaded."""

MAX_REQUESTS_PER_SECOND: Final = 20_000
"""Offers and pulls of one worker after the first `MAX_REQUESTS_PER_WORKER`: several times what an engine makes, and a
fifth of what the gateway can read, so that a runaway worker leaves room for others."""

MAX_UNACKNOWLEDGED: Final = 16_384
"""Notifications kept for one worker until it acknowledges them, while its pool exists; when full its new requests are
refused. Twice the offers and pulls that it may have open, which can all end at once."""

NOTIFICATIONS_PER_BATCH: Final = 256
"""Notifications in one message to a worker."""

# --- tickets and pulls ------------------------------------------------------------------------------------------------
MAX_RANKS_PER_WORKER: Final = 16_384
"""Producer ranks in the tickets of one worker's open pulls: as many pulls as it may have, of four ranks each."""

MAX_TICKET_BYTES_PER_WORKER: Final = 64 * MIB
"""Tickets of one worker's open pulls, in memory: 12 M block ids. They stay there until their pull ends."""

MAX_TICKET_SPANS: Final = 1 << 14
"""Spans of one ticket, over its lists of blocks: of 1,024 ranks with a list each, of 16 groups. As text they may have 8
characters each, and the loop takes milliseconds to make them."""

SPAN_BYTES: Final = 128
"""What a span of a ticket takes in memory beside its block ids; as text it may have 6 bytes."""

MAX_LEAVING: Final = 1024
MAX_LEAVING_TICKET_BYTES: Final = 16 * MIB
"""One worker's pulls that were cancelled before their producers' daemons were known, and as many transfers of which a
producer is told that their readers will not come; and their tickets in memory: those of a batch of requests that is
aborted. The oldest are given up beyond it, and their offers end by their time."""

# --- offers and claims ------------------------------------------------------------------------------------------------
MAX_OFFERED_BLOCKS: Final = 1 << 24
"""Block ids in one worker's offers that stand, which are kept until they end: 64 MiB."""

MAX_CONSUMERS: Final = 1024
"""Consumers that an offer may wait for before it ends; for more, make it without such an end."""

MAX_CONSUMERS_PER_WORKER: Final = 1 << 17
"""Consumers that have finished with one worker's offers that stand, up to 400 bytes each: 50 MiB."""

MAX_STAMPS: Final = 65_536
"""Leases with a stamp at a time, in 1 MiB; others are claimed and fenced by message."""

MAX_CLAIMS_PER_OFFER: Final = 4 * MAX_RANKS
"""Claims that hold one offer: every rank of a consumer, and of a second one that a router tried. A rank may have two:
one only holds the offer while the request queues, one reads."""

BLOCKS_PER_PULL: Final = 256
"""As so many blocks that are given back a pull counts that is routed and claimed, or ends: it takes up to 90 us."""

BLOCKS_PER_RETURN: Final = 8
"""As so many blocks that are given back a span of them counts, though it has none: it takes 2 us."""

BLOCKS_PER_CLAIM: Final = 16
"""As so many blocks that are given back a claim counts that breaks with its offer: it takes 5 us."""

MAX_CLAIMS_PER_PEER: Final = 1 << 16
"""Claims of one peer that hold offers, 1 KiB each: those of all ranks in the pulls that four workers may have open."""

MAX_CLAIMS_PER_USER: Final = MAX_CLAIMS_PER_PEER // 2
"""Those of one user's pulls at one producer that begin with a claim: pulls of what grows for ever hold theirs until
their time is over, and other users of the daemon need some."""

MAX_CLAIMS_WAITING: Final = 16_384
"""Claims of all peers that wait for their offer: about 10 MiB."""

MAX_CLAIMS_WAITING_PER_PEER: Final = 2048
"""Those of one peer: half the pulls that one worker may have open. One peer that only waits leaves room for others.
Those whose readers have left give their places to others, the oldest first; their offers end by their time."""

MAX_CLAIMS_AHEAD: Final = MAX_CLAIMS_WAITING_PER_PEER // 2
"""Claims of one user's pulls that may wait at one producer, as their tickets name no lease: half of what that has room
for, so that one user of a daemon who pulls what is never offered leaves room for others."""

MAX_WRONG_PROOFS: Final = 64
"""Claims of one peer with a wrong proof that are answered at once, and as many per minute later; others get no answer.
This bounds the work of answering: nobody guesses 128 bits."""

MAX_UNKNOWN_CLAIMS: Final = 16_384
MAX_UNKNOWN_CLAIMS_PER_SECOND: Final = 1024
"""Claims of one peer in its renewals and fences that are not held here: as many at once, then so many a second; of a
peer with more, renewals and fences are dropped unread. Honest ones have them when many offers end at one moment; each
takes up to 20 us of the loop, and some frames name 4,096."""

MAX_RENEWALS: Final = 4096
"""Claims that one message renews, in 4 ms; more take several, with other messages in between."""

MAX_SETTLED: Final = 256
"""Ended reads in one message to their producer; 200 bytes each."""

MAX_TOMBSTONES: Final = 16_384
"""Ended offers and claims that are remembered, so that a late request learns why they ended. Beyond it the oldest are
forgotten, and a late request hears that they are unknown; one peer or worker has half of them. About 10 MiB."""

# --- offers that grow -------------------------------------------------------------------------------------------------
MAX_PARTS_PER_OFFER: Final = 4096
"""Extensions of one offer: 2 M tokens in chunks of 512. A reader that asks for all of them takes 2 ms of the loop,
their end 10 ms."""

MAX_SPANS_PER_OFFER: Final = 1 << 16
"""Spans in all of these: 16 groups of layers each time. They are joined when it is closed, in 11 ms of the loop."""

MAX_PARTS_PER_WORKER: Final = 1 << 18
"""Spans in all that one worker's offers that stand have named, and extensions without any, which are kept until those
end, 250 bytes each: 64 MiB. A prompt of 100,000 tokens in chunks of 512 makes 200, for each group of layers."""

BLOCKS_PER_SPAN: Final = 16
"""As so many ids a span counts there: it takes as long to join."""

MAX_PART_BLOCKS: Final = 1 << 14
"""Block ids of an offer that grows which its reader is told of at once, 64 KiB: 256,000 tokens in blocks of 16. 4,096
such answers may wait to be read by one peer."""

MAX_PARTS_TOLD: Final = MAX_PARTS_PER_OFFER + 1 + MAX_BLOCKS_PER_REQUEST // MAX_PART_BLOCKS
"""Parts of one offer that its reader is told of: extensions, the close, and what `MAX_PART_BLOCKS` cuts them into."""

MAX_TOLD_BYTES: Final = 64 * MIB
MAX_TOLD_BYTES_PER_SECOND: Final = 16 * MIB
SMALL_TOLD_BYTES: Final = 4 * KIB
"""Bytes of such answers that one peer gets at once, and a second; it asks again for what is left. One that leaves them
unread on ever new connections would fill the memory, and honest ones read blocks of hundreds of gigabytes in that time.
Answers of up to 1,024 blocks do not count: they are as long as other messages."""

# --- times that may be asked for, in seconds --------------------------------------------------------------------------
MIN_PULL_TIMEOUT: Final = 0.001
MAX_PULL_TIMEOUT: Final = 3600.0
MAX_LEASE_TTL: Final = 3600.0
MAX_COMMAND_SECONDS: Final = 86_400.0
"""How long a command may be told to wait: a day. The kernel takes no infinity."""

# --- peers ------------------------------------------------------------------------------------------------------------
MAX_PEERS: Final = 4096
"""Daemons that one daemon talks to."""

MAX_PEERS_FILE_BYTES: Final = KIB * MAX_PEERS
"""The file that lists them: for each a name, an address with its key, and a comment."""

MAX_PEERS_PER_WORKER: Final = MAX_PEERS // 2
"""Of those, the ones that pulls of one worker led to: a ticket names up to `MAX_RANKS` addresses, perhaps made up."""

MAX_PEERS_PER_STRANGER: Final = MAX_PEERS // 4
"""Those that pulls of one user needed first, unless that is root or the daemon's own; a ticket has as many."""

MAX_PEERS_OF_STRANGERS: Final = MAX_PEERS // 2
"""The same of all such users."""

MAX_PEERS_PER_PROCESS: Final = 64
MAX_PEERS_PER_USER: Final = 1024
"""Connections of one process, and of one user, to the Unix socket for peers; an honest daemon has one or two."""

MAX_STRANGE_PEERS: Final = 256
"""Those that have not shown an allowed key yet, which takes milliseconds. One more takes the place of the oldest of the
user who has most of them."""

MAX_PEERS_UNANSWERED: Final = 16
"""Those that libzmq has not come to accept: it takes descriptors of the reserve."""

MAX_HELLOS_PER_SECOND: Final = 100
"""Hellos of one peer after the first `MAX_PEERS`: replicas may share a key, and each sends one per heartbeat."""

MAX_HANDSHAKES: Final = 16
"""Handshakes at a time; others queue. Loading a peer's metadata stops the transport for 0.4 to 3 ms; a thousand peers
at once would stop every read for seconds."""

MAX_HANDSHAKES_PER_KEY: Final = 4
"""Those of daemons with one public key. What a hostile one says of itself may take the process that tries it, and
6 seconds each time."""

MAX_METADATA_BYTES: Final = MIB
"""A daemon's transport metadata: 1 KiB, and some hundred bytes per pool."""

MAX_OWN_METADATA_BYTES: Final = MAX_METADATA_BYTES - 8 * KIB
"""What the transport's process may say of itself: beside it there is what daemons of this host need."""

MAX_REPORTED_PEERS: Final = 16
"""Peers in a status, those in trouble first: a thousand would take 200 KiB and milliseconds of the loop. `kvd_peers`
counts all by state."""

# --- connections ------------------------------------------------------------------------------------------------------
# Alike for what speaks ZMTP itself (`kvd.net.local`) and for libzmq (`kvd.net.zmq_socket`).
LINGER_MS: Final = 200
HANDSHAKE_MS: Final = 5000
RECONNECT_MS: Final = 20
RECONNECT_MAX_MS: Final = 500
BACKLOG: Final = 1024
SEND_MESSAGES: Final = 4096

SHARED_BYTES: Final = 4096
"""Longer answers to peers (welcomes) share one copy, however many leave them unread."""

# --- transport --------------------------------------------------------------------------------------------------------
SLICE_BYTES: Final = 4 * MIB
"""One post to NIXL: about 0.5 ms at memory speed, which bounds how long a short transfer waits behind a long one.
16 MiB made long reads no faster, and a short one took 4.6 times its time instead of 1.9 (`kvd bench --load`)."""

SLICE_DESCRIPTORS: Final = 512
"""Descriptors in one post: scattered small blocks cost about 5 us each, so bytes alone do not bound a post's time."""

GPU_SLICE_BYTES: Final = 256 * MIB
"""One launch that copies within a GPU, 0.2 ms on an H200. Beside an engine's kernels each launch waits for its turn, 1
to 2 ms, so few are better than many."""

GPU_PEER_SLICE_BYTES: Final = 32 * MIB
"""The same between two GPUs, which may have no more than PCIe between them: 1.3 ms at 25 GB/s."""

GPU_SLICE_DESCRIPTORS: Final = 16384
"""Descriptors of such a launch."""

MAX_BYTES_IN_FLIGHT: Final = 64 * MIB
"""Posted bytes for each peer: enough to fill a network, too few to fill the transport's queues. A slice with more than
that is posted alone."""

OLDEST_TURN: Final = 4
"""Every fourth slice is the oldest transfer's, so that short ones cannot starve a long one."""

MAX_NOTIFICATION_BYTES: Final = 16 * KIB
"""A message between transports; the longest asks for `SLICE_DESCRIPTORS` pieces of a pool, 8 KiB."""

MAX_NOTIFICATIONS_AT_ONCE: Final = 256
"""Such messages that the transport's process passes on between two looks at its reads, and that the daemon takes from
it in one turn of its loop; both drop what comes above it."""

TRANSPORT_SILENCE_SECONDS: Final = 30
"""How long what was sent over TCP for reads may stay unacknowledged before UCX gives the connection up, and with it
reads that hang: when the network of the data dies they would keep their blocks for the kernel's quarter of an hour.
Longer than messages take to lose a peer that stands still, also with heartbeats of 5 s."""

# --- GPU pools read over the network ----------------------------------------------------------------------------------
STAGING_WINDOWS: Final = 64
"""Windows of `SLICE_BYTES` of pinned host memory by which others read a daemon's GPU pools: 256 MiB in all."""

STAGING_SHARE: Final = 4
"""A pool gets the fourth part of the windows that no other pool has, one at least: 16 if it is the only one, 64 MiB.
Four readers have what fills a network; more take turns. After 15 pools there is none left, and one more is refused."""

STAGING_SLOTS: Final = 16
"""Slots of `SLICE_BYTES` of pinned host memory by which a daemon reads from others into its GPU pools: 64 MiB."""

MAX_STAGED_SLICES: Final = 4
"""Slices of one reader for which it has a window at one peer, or waits for one: one is copied while others travel."""

MAX_STAGED_REQUESTS: Final = 1024
"""Requests of all readers of one pool that wait for a window, of 8 KiB each at most; others are dropped, and asked for
again."""

WINDOW_SECONDS: Final = 30.0
"""How long a reader may have a window while others wait: 16 MiB, four windows, at 5 Mbit/s. It was killed otherwise."""

STAGED_REFUSALS: Final = 64
"""Requests that were refused of which a pool's board tells, the latest: they get no window."""

# --- pools exported to others on the host -----------------------------------------------------------------------------
MAX_IMPORTS_PER_PROCESS: Final = 16
"""Connections of one process to the export socket; an honest one has one, or two while it imports anew."""

MAX_IMPORTS_PER_USER: Final = 1024
"""Those of one user: the only share where processes cannot be told apart (other PID namespaces, before Linux 6.9)."""

MAX_IMPORTS_ASKING: Final = 256
"""Those that have not shown a token. One more takes the place of the oldest of the user who has most of them."""

MAX_IMPORTS_UNREAD: Final = 64
MAX_IMPORTS_UNREAD_PER_PROCESS: Final = 4
"""Those of one user, and of one process, that have not read all their pools. Two descriptors of each may be on their
way, which the kernel counts as the exporting daemon's user's, and refuses it more than its limit of open files."""

MAX_ACCEPTS_AT_ONCE: Final = 2048
MAX_ACCEPTS_PER_SECOND: Final = 1000
"""Connections to the export socket and to a Unix socket for peers: a tenth of the loop's time. More wait in the
kernel, the first to come first."""

MAX_TOKENS: Final = 2048
"""Sets of pools that importers may ask for, the latest ones: each pool that comes or goes makes another set."""

IMPORT_SECONDS: Final = 5.0
"""How long to wait for a peer's pools, a millisecond as a rule; and how long a connection may ask nothing."""

# --- HTTP -------------------------------------------------------------------------------------------------------------
MAX_HTTP_CONNECTIONS: Final = 64
"""Open connections; a scraper and a kubelet have a handful. One more closes one of the address with the most."""

MAX_HTTP_REQUEST_BYTES: Final = 16 * KIB
"""Request line and headers together."""

MAX_HTTP_LINES: Final = 64
"""Of them: a thousand short headers take 5 ms to read."""

HTTP_BACKLOG: Final = 1024
"""Connections that the kernel queues while the thread is busy, or rests: at 0.14 ms each, a probe among as many waits
0.7 s. One more is dropped by the kernel, and its client waits a second before it tries again."""

HTTP_SECONDS: Final = 10.0
"""Lifetime of a connection, however slow the other side is; a scrape takes milliseconds."""

HTTP_SHARE: Final = 0.2
"""Of one core, for the HTTP port while it is asked without a pause: hundreds of answers a second. The daemon's loop
waits for the interpreter meanwhile."""

HTTP_REST_SECONDS: Final = 1.0
"""The longest that it rests for what it has done: a liveness probe has seconds."""

METRICS_PER_SECOND: Final = 20
"""Texts of all metrics that are written in a second, of 1 to 2 ms each; more requests get the last one again."""

# --- engines ----------------------------------------------------------------------------------------------------------
MAX_ENDED_TICKETS: Final = 1024
"""Tickets that a vLLM engine remembers to have used: samples of one prompt may come when the first has its blocks."""

MAX_TURN_PREFIXES: Final = 32
"""Beginnings of a turn that are told apart, 40 bytes each: the next prompt may leave it at any of them."""

MAX_TRANSFER_RECORDS: Final = 1024
"""Requests of an SGLang engine whose cache moves at a time, each with a record in the pool (2 KiB); more wait."""

MAX_TOP_LOGPROBS: Final = 128
"""Likeliest first tokens of a prefill that SGLang is told of: its buffers have so many places."""

MAX_UNEXPECTED_ROOMS: Final = 4096
"""Requests that SGLang's decode engines want, each rank for itself, and that the prefill engine has not got: the oldest
are forgotten. As many tickets a bootstrap server waits for."""

MAX_UNREAD_ANSWERS: Final = 16
"""Messages of one engine's rank that SGLang's bootstrap server has not read yet, of up to `MAX_MESSAGE_BYTES` each."""
