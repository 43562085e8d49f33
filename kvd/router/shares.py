"""Which client has how much of what the router bounds."""


class Shares:
    """How much there is of something, in all and of each client."""

    def __init__(self) -> None:
        self.total = 0
        self._of: dict[str, int] = {}

    def of(self, client: str) -> int:
        """The share of `client`."""
        return self._of.get(client, 0)

    def add(self, client: str, amount: int) -> None:
        """Counts `amount` more of `client`, or fewer."""
        self.total += amount
        self._of[client] = self.of(client) + amount
        if not self._of[client]:
            del self._of[client]
