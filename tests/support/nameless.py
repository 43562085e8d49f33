"""Peers whose addresses have no names."""

from abc import abstractmethod


class Nameless:
    """What a `kvd.net.interface.PeerPort` has for names, where there are none."""

    @abstractmethod
    def ask(self, link: int, frame: bytes) -> bool: ...

    def greet(self, link: int, frame: bytes) -> None:
        self.ask(link, frame)

    def trouble(self, _link: int) -> str:
        return ""

    def hurry(self, _link: int, _party: str) -> None:
        """Nothing waits."""
