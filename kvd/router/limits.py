"""Every bound of the router, with its unit and reason. Those that it shares with daemons are in `kvd.limits`."""

from typing import Final

from kvd.limits import KIB, MIB

CONNECTIONS: Final = 4096
"""Open connections of clients; one more closes one that waits for a request. Each costs 50 KiB and a descriptor."""

REQUESTS: Final = 2048
"""Requests in flight: several times what a few engines take in a batch. More are answered 503, to be sent again."""

CLIENT_REQUESTS: Final = REQUESTS // 2
"""Those of one client's address, which may be a proxy; the other half is for others."""

LISTINGS: Final = 64
"""Requests for the list of models that decode servers are asked at a time; each takes a connection, and 2 s at most."""

OPEN_FILES: Final = CONNECTIONS + 3 * REQUESTS
"""Descriptors that it may need: a request has connections to two servers, for a moment, and its release has one."""

HEADER_BYTES: Final = 16 * KIB
"""The request line, and each header; a token for authorization has a few KiB."""

ANSWER_HEADER_BYTES: Final = 4 * HEADER_BYTES
"""Each header of a server's answer: some repeat what the client sent, which must not make the server fail."""

HEADERS: Final = 64
"""Headers of one request."""

BODY_BYTES: Final = 32 * MIB
"""One request's body: four times a prompt of 1 M token ids as JSON; a chat with a few images."""

LARGE_BYTES: Final = MIB
"""A body that takes more is read beside the loop: 1 MiB takes milliseconds, 30 of them if it is a chat of brackets;
32 MiB a few tenths of a second, and 0.9 s if it is a chat of lists that are nested 900 deep."""

FIELDS: Final = 256
"""Fields of one body; vLLM knows about a hundred."""

FIELDS_BYTES: Final = MIB
"""A body's fields other than prompts, messages and documents: hundreds of tools. Each byte may become ten."""

BRACKETS: Final = 1 << 16
"""Of those that begin an array or an object in those fields, also within strings: to follow 1 MiB of brackets takes
50 ms of the loop. Of tools, 1 MiB has fewer."""

DEPTH: Final = 64
"""Levels of those fields. vLLM pickles what it does not know, and its engine dies of 480 (0.32)."""

MESSAGES: Final = 4096
COMMAS: Final = 1 << 16
"""Messages of a chat, and commas in them, with which every message ends a beginning that is known: in milliseconds. Of
chats with more, beginnings are known like those of other prompts."""

BODIES_BYTES: Final = 512 * MIB
"""The bodies of all requests in flight; with what is made of them the process takes about three times that."""

CLIENT_BODIES_BYTES: Final = BODIES_BYTES // 2
"""Those of one client's address."""

PREFILL_ANSWER_BYTES: Final = 64 * MIB
"""A prefill server's answer: transfer parameters with a ticket, and perhaps the prompt, echoed with its logprobs."""

REFUSAL_BYTES: Final = MIB
REFUSAL_SECONDS: Final = 5.0
"""The body of an answer with another status than 200, and its time after the head: it only says why."""

CHUNK_BYTES: Final = 64 * KIB
"""Read ahead of a decode server's answer that the client has not taken yet; then the server waits."""

HELD_BYTES: Final = MIB
"""Of the beginning of a decode server's stream, until it says something. An event is longer if it has all token ids."""

ERROR_EVENT_BYTES: Final = 16 * KIB
"""Held of an unfinished event of that stream, to see whether it says an error: a message, its type and its code."""

HELD_EVENTS: Final = 4096
"""Events in that beginning: comments twice a minute for an hour are 120, and each choice of a chat has one."""

PASSED_ON_CHARS: Final = 256
"""A header of a server's answer that is passed on. Longer, or with other characters, clients could not read it."""

IDLE_SECONDS: Final = 30.0
"""How long a client's connection may go without a whole request head; proxies in front reuse theirs more often."""

BODY_SECONDS: Final = 60.0
"""For a whole body: 32 MiB at 5 Mbit/s."""

LINGER_SECONDS: Final = 1.0
"""How long the rest of a refused body is read and dropped: closing first would cut the answer short."""

CLIENT_SECONDS: Final = 60.0
"""How long a client may take nothing of an answer that is ready, before both its requests are given up."""

REQUEST_SECONDS: Final = 3600.0
"""From a request's body to its last token: so long no engine should be occupied, however steadily tokens come."""

CONNECT_SECONDS: Final = 5.0
"""Until a server accepts a connection: two lost packets of the kernel's."""

SILENT_SECONDS: Final = 10
PROBES: Final = 3
"""After so many probes at such intervals that its kernel does not answer, a server's host is taken for gone."""

KEEP_SECONDS: Final = 3.0
"""How long an idle connection to a server is kept: less than the 5 s after which vLLM closes it."""

ATTEMPTS: Final = 3
"""Servers that fail before a request does: when more fail, the request is likelier at fault than they are."""

REST_SECONDS: Final = 5.0
LONGEST_REST_SECONDS: Final = 120.0
"""A server that failed is chosen only if no other is there, for so long, and each time for twice as long, up to this.
One that hangs costs a request its deadline each time; one that was away is back in use so late."""

AFFINITY_REQUESTS: Final = 4
"""How many more requests than the least busy server one that knows a prompt's beginning may have, and be chosen."""

EARLY_REQUESTS: Final = 4
"""Requests in flight at a prefill server up to which a decode server gets one at the same time. Beyond them it would
keep blocks for a prefill that only queues."""

PREFIXES: Final = 1 << 16
"""Beginnings of prompts of which the router knows who served them, the latest: about 16 MiB."""

PREFIXES_PER_REQUEST: Final = 64
"""Beginnings of one prompt: a chat's last messages."""

FIRST_PREFIX_BYTES: Final = 256
"""The shortest beginning of a prompt without messages, as JSON; the next ones are each twice as long."""

LEFT_PREFILLS: Final = 128
"""Prefills of clients that are gone, or of pairs that failed, that are left to end, at a time; more are aborted. Of
requests whose offers are released there are as many as `REQUESTS`: a decode server that dies may have had all."""

CLIENT_LEFT_PREFILLS: Final = LEFT_PREFILLS // 2
"""Those of one client's address: who leaves again and again would take the place of all others."""

CLEANUP_BYTES: Final = 128 * MIB
"""The bodies of both, which are kept; with what is made of them about three times that. Beyond it offers end by the
prefill engine's `offer_ttl`."""

CLIENT_CLEANUP_BYTES: Final = CLEANUP_BYTES // 2
"""Those of one client's address."""

LEAVE_SECONDS: Final = 2.0
"""How long a prefill may go on when its client is gone, before it is aborted: most end sooner, and then their offer can
be released, which that of an engine aborted in its last step cannot."""

RELEASE_SECONDS: Final = 5.0
"""For a decode server to begin its answer to the request that releases an offer: then another one gets it. Three that
hang take half the `offer_ttl` of a prefill engine."""

TAKEN_SECONDS: Final = 5.0
"""After the head of its answer: vLLM gives its engine the request milliseconds later, on cores that others keep busy
seconds later, and drops it if its client leaves before that. For so long it may go on to load the blocks."""

TURNS: Final = 2048
TURN_BYTES: Final = 64 * KIB
"""Conversations whose next turn may be prefilled with blocks of the last one, and the parameters of each: 128 MiB at
most. A ticket for 100,000 tokens has a few KiB, unless their blocks are scattered."""

TURN_SECONDS: Final = 3600.0
"""How long a turn is remembered at most: decode servers say for how long they keep it."""

TURNS_ASKED: Final = 64
"""Decode servers that are asked at a time for what they kept; of other turns nothing is kept."""

TURN_ASK_SECONDS: Final = 10.0
"""For a decode server to answer that, behind what it has in its queue."""

TURN_WAIT_SECONDS: Final = 0.2
"""How long a turn that comes at once waits for that answer: no longer than it takes to compute some hundred tokens."""

PROBE_SECONDS: Final = 2.0
PROBE_BYTES: Final = 4 * MIB
"""For a server to say that it is healthy, or its models, thousands of adapters among them. That it is healthy holds for
as long, however often the router is asked."""

LINES: Final = 20
"""Log lines a minute from each place in the code: 2,000 characters each make 60 MB a day, however much clients send."""

STOP_SECONDS: Final = 30.0
"""How long requests in flight may go on after SIGTERM."""

CANCEL_SECONDS: Final = 1.0
"""For those that are then cancelled to close their connections."""
