"""What arrives at a control socket, at whose port anybody may send anything."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

import zmq
import zmq.asyncio

from kvd.engines.sglang import messages
from kvd.engines.sglang.messages import Message
from kvd.errors import BadRequest

logger = logging.getLogger(__name__)

_TURN_SECONDS: Final = 0.005


async def read(control: zmq.asyncio.Socket, heard: Callable[[Message], None]) -> None:
    """Calls `heard` with each message, for good; it must not raise. What is no message is counted.

    If messages do not end, or take long, other tasks have the loop for half of the time.
    """
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(control)  # whose recv_multipart does not wait for the loop
    unreadable = 0
    while True:
        await control.poll()
        began = time.monotonic()
        spent = 0.0
        while spent < _TURN_SECONDS:
            try:
                frames = plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                message = messages.decode(frames[0])
            except BadRequest as error:
                unreadable += 1
                if unreadable.bit_count() == 1:  # the 1st, 2nd, 4th, ...: whoever reaches the port can send any
                    logger.warning("%d messages to this engine could not be read, the last: %s", unreadable, error.text)
            else:
                heard(message)
            spent = time.monotonic() - began
        await asyncio.sleep(spent if spent >= _TURN_SECONDS else 0)
