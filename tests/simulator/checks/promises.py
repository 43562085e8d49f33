"""The promises of the design, by the names that violations carry, and where each is checked.

| promise | checked |
|---|---|
| ENDS_ONCE | at every notification (one outcome, in time), and at rest: no pull is open, no block is missing |
| FENCED | at every `Done`, byte by byte; producers write over blocks as soon as they are theirs again |
| QUARANTINE | at every byte that the transport stores: the mask of what is lent to a pull just then |
| NOTIFIED | at every batch: a number names one notification; at rest: none is missing |
| OWN_POOL | at every store and fetch (mask, bounds), and by requests that name other blocks |
| BAD_INPUT | garbage on every socket is answered by an error; wrong requests are refused, wrong tickets never done |
| SURVIVES | a pull to which nothing happened is done; pools survive daemons; a healed world serves |
| SOUND | no actor raises, and a world at rest holds nothing any more |
"""

from enum import StrEnum


class Promise(StrEnum):
    """Numbered as in the design; 0 is what they all rest on."""

    SOUND = "0: no actor raises, nothing leaks"
    ENDS_ONCE = "1: every pull ends once, in time"
    FENCED = "2: done means the bytes that were offered"
    QUARANTINE = "3: nothing is written to free blocks"
    NOTIFIED = "4: no notification is lost, none comes twice"
    OWN_POOL = "5: only blocks of the own pool"
    BAD_INPUT = "6: bad input is refused and changes nothing"
    SURVIVES = "7: a death costs only what it must"
