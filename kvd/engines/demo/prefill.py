"""The prefill engine's process: prompts in, first tokens and tickets out."""

from kvd import client
from kvd.engines.demo.engine import AttachedEngine, Loop
from kvd.engines.demo.messages import Channel, Prefilled, Prompt, Released, ToPrefill

IDLE_SECONDS = 0.005
"""How long to wait for prompts before looking for notifications again."""


class PrefillEngine(Loop[Prompt]):
    """Computes prompts in order, each as soon as there are blocks for it."""

    def __init__(self, kv: AttachedEngine, channel: Channel[ToPrefill]) -> None:
        super().__init__(kv, channel)
        self._released: dict[str, list[str]] = {}

    def run(self) -> None:
        """Serves until stopped and every offer is released."""
        while not (self._stopping and not self._waiting and not self._released):
            busy = self._waiting and self._kv.blocks.can_allocate(len(self._waiting[0].tokens))
            self._receive(0.0 if busy else IDLE_SECONDS)
            self._collect()
            if busy:
                self._prefill(self._waiting.popleft())

    def _prefill(self, prompt: Prompt) -> None:
        table = self._kv.blocks.allocate(prompt.request, len(prompt.tokens))
        token = self._kv.engine.prefill(prompt.tokens, table)
        self._released[prompt.request] = []
        ticket = self._kv.offer(prompt.request, len(prompt.tokens), table)
        self._channel.send(Prefilled(request=prompt.request, token=token, ticket=ticket))

    def _collect(self) -> None:
        """Frees blocks once every rank's offer is released."""
        for event in self._kv.poll(0.0):
            if not isinstance(event, client.Released):
                continue
            reasons = self._released[event.offer]
            reasons.append(event.reason)
            if len(reasons) == self._kv.ranks:
                self._kv.blocks.free(event.offer)
                del self._released[event.offer]
                self._channel.send(Released(request=event.offer, reasons=reasons))


if __name__ == "__main__":
    PrefillEngine.main(ToPrefill)
