"""What any actor may say to a worker at once, without a message to the gateway."""

from typing import Protocol

from kvd.errors import KvdError
from kvd.protocol.types import Message
from kvd.protocol.worker import Notifications


class WorkerReplies(Protocol):
    """Sends to attached workers by name; what is for a worker without a session is dropped."""

    def answer(self, worker: str, message: Message) -> None:
        """Answers a request. Hangs up on a worker whose queue is full: it would wait for the answer forever."""

    def refuse(self, worker: str, call: int, error: KvdError) -> None:
        """Refuses the request `call`, as `answer` does; nothing has changed."""

    def notify(self, worker: str, batch: Notifications) -> bool:
        """Sends notifications; False if the worker's queue is full: send them again later."""
