"""The promises of the design, by the names used in violations, and where each is checked.

| promise | checked |
|---|---|
| ENDS_ONCE | at every notification (one outcome, in time); once idle: no pull is open, no block is missing |
| FENCED | at every `Done`, byte by byte; producers overwrite blocks as soon as they get them back; pulls into offers |
| QUARANTINE | at every byte that the transport stores, against the mask of what is lent to a pull |
| NOTIFIED | at every batch: a number names one notification; once idle: none is missing |
| OWN_POOL | at every store and fetch (mask, bounds), and by requests that name other blocks |
| BAD_INPUT | garbage on every socket is answered by an error; wrong requests are refused; wrong tickets bring no byte |
| SURVIVES | a pull that no fault hit is done; pools survive daemons; a healed world serves |
| SOUND | no actor raises, and an idle world holds nothing |
"""

from enum import StrEnum


class Promise(StrEnum):
    """Numbered as in the design; all depend on 0."""

    SOUND = "0: no actor raises, nothing leaks"
    ENDS_ONCE = "1: every pull ends once, in time"
    FENCED = "2: done means the bytes that were offered"
    QUARANTINE = "3: nothing is written to free blocks"
    NOTIFIED = "4: no notification is lost, none comes twice"
    OWN_POOL = "5: only blocks of the own pool"
    BAD_INPUT = "6: bad input is refused and changes nothing"
    SURVIVES = "7: a death costs only what it must"
