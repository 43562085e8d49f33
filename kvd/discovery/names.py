"""Peers from DNS, such as headless services of Kubernetes.

`_kvd._tcp.decode.example` is looked up as SRV records: each has a port and a host, whose first label is the daemon's
name, as for the pods of a StatefulSet. `decode.example:7710` is looked up as A and AAAA records: a daemon at each
address, at that port. These have no names, so CURVE, which finds a daemon's key by its name, needs SRV records.
"""

import asyncio
import re
from typing import Final, NamedTuple

import dns.asyncresolver
import dns.exception
import dns.resolver
from dns.rdatatype import RdataType

from kvd import limits
from kvd.errors import ErrorCode, refusal
from kvd.net.trust import Trust
from kvd.protocol.address import check_mutual

MIN_SECONDS: Final = 5.0
MAX_SECONDS: Final = 60.0
"""Between look-ups, whatever the records' time to live."""
_LOOKUP_SECONDS: Final = 5.0
_AT_ONCE: Final = 32
_SERVICE: Final = re.compile(r"_[A-Za-z0-9-]+\._tcp\.[A-Za-z0-9._-]+")
_HOST: Final = re.compile(r"(?P<host>[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_FAMILIES: Final = (RdataType.A, RdataType.AAAA)


class Found(NamedTuple):
    """The addresses behind a name, and for how many seconds they hold."""

    addresses: frozenset[str]
    holds: float
    strangers: frozenset[str] = frozenset()
    """Daemons that are left out, as the allow-list has no key for them."""


class PeerNames:
    """Looks up one name; `own` is the address at which peers reach this daemon, called `daemon`.

    Raises:
        BadRequest: `BAD_CONFIG`, the name has neither form, or CURVE needs the other form.

    """

    def __init__(self, name: str, daemon: str, own: str, trust: Trust | None, server: str | None = None) -> None:
        host = _HOST.fullmatch(name)
        if not _SERVICE.fullmatch(name) and not host:
            text = f"peers_dns: {name!r} is neither `_service._tcp.name` (SRV) nor `name:port` (A and AAAA)"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        if host and trust is not None:
            text = f"peers_dns: A records of {name!r} have no daemon names to find keys by; use SRV records"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        self._service = "" if host else name
        self._host, self._port = (host["host"], int(host["port"])) if host else ("", 0)
        self._daemon, self._own, self._trust = daemon, own, trust
        self._resolver = dns.asyncresolver.Resolver(configure=server is None)
        self._resolver.lifetime = _LOOKUP_SECONDS
        if server is not None:
            place, _, port = server.rpartition(":")
            self._resolver.nameservers, self._resolver.port = [place.strip("[]")], int(port)
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def look_up(self) -> Found:
        """The daemons behind the name, without this one; none if there are no records.

        Raises:
            Unavailable: `DEADLINE`, no server answered.
            BadRequest: `BAD_CONFIG`, there are too many daemons, or one that could not reach this one.

        """
        try:
            found = await (self._services() if self._service else self._addresses(self._host, self._port))
        except dns.exception.DNSException as error:
            raise refusal(ErrorCode.DEADLINE, f"looking up {self._service or self._host}: {error}") from error
        addresses = found.addresses - {self._own}
        if len(addresses) > limits.MAX_PEERS:
            text = f"{self._service or self._host} has {len(addresses)} daemons; {limits.MAX_PEERS} may be met"
            raise refusal(ErrorCode.BAD_CONFIG, text)
        check_mutual(self._own, addresses)
        return Found(addresses, min(MAX_SECONDS, max(MIN_SECONDS, found.holds)), found.strangers)

    async def _services(self) -> Found:
        answer = await self._records(self._service, RdataType.SRV)
        targets = {(record.target.to_text(omit_final_dot=True), record.port) for record in answer or ()}
        others = sorted(target for target in targets if _daemon_of(target[0]) != self._daemon)
        keys = {host: self._key_of(_daemon_of(host)) for host, _ in others}
        known = [target for target in others if keys[target[0]] is not None][: limits.MAX_PEERS + 1]
        each = await asyncio.gather(*(self._addresses(f"{host}.", port) for host, port in known))
        addresses = {
            f"{address}{keys[host]}" for (host, _), one in zip(known, each, strict=True) for address in one.addresses
        }
        strangers = frozenset(_daemon_of(host) for host, key in keys.items() if key is None)
        return Found(frozenset(addresses), min([_ttl(answer), *(one.holds for one in each)]), strangers)

    async def _addresses(self, host: str, port: int) -> Found:
        found: set[str] = set()
        holds = MAX_SECONDS
        for family in _FAMILIES:
            answer = await self._records(host, family)
            for record in answer or ():
                place = record.address if family is RdataType.A else f"[{record.address}]"
                found.add(f"tcp://{place}:{port}")
            holds = min(holds, _ttl(answer))
        return Found(frozenset(found), holds)

    async def _records(self, name: str, kind: RdataType) -> dns.resolver.Answer | None:
        async with self._room:
            try:
                return await self._resolver.resolve(name, kind, search=True)
            except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
                return None

    def _key_of(self, daemon: str) -> str | None:
        """The suffix of that daemon's address: empty without CURVE, None if its key is unknown."""
        if self._trust is None:
            return ""
        key = self._trust.key_of(daemon)
        return None if key is None else f"#{key.hex()}"


def _ttl(answer: dns.resolver.Answer | None) -> float:
    return MAX_SECONDS if answer is None or answer.rrset is None else answer.rrset.ttl


def _daemon_of(host: str) -> str:
    return host.partition(".")[0]
