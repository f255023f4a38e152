"""How visitors come in: on this machine by a token in the address, in a team by accounts behind TLS."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from threading import Lock

from kedge.core.errors import ConfigError
from kedge.label.accounts import Person, find_bearer, find_session
from kedge.label.database import Store

COOKIE = "__Host-kedge"
"""A browser takes this name only with Secure, for the whole path, and from this host alone."""
LOGINS_A_MINUTE = 5
_MOST_ADDRESSES = 10_000
_IPV6_HOME = 64

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    person: Person
    csrf: str | None
    """What every message that changes something must repeat; None for machines, which send their token each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEntrance:
    """One person on this machine: the address has a token that nobody can guess."""

    token: str = field(repr=False)
    person: Person


@dataclass(slots=True, kw_only=True)
class Logins:
    """At most five log-ins a minute from one address, right or wrong."""

    now: Callable[[], float] = time.monotonic
    most: int = LOGINS_A_MINUTE
    _times: OrderedDict[str, deque[float]] = field(default_factory=OrderedDict[str, deque[float]])
    _lock: Lock = field(default_factory=Lock)

    def may(self, address: str) -> bool:
        """Count a try; False where there were too many. Of IPv6 a home has many addresses, and counts as one."""
        home, now = _home(address), self.now()
        with self._lock:
            times = self._times.setdefault(home, deque())
            self._times.move_to_end(home)
            while times and times[0] <= now - 60:
                times.popleft()
            if len(self._times) > _MOST_ADDRESSES:
                self._times.popitem(last=False)
            if len(times) >= self.most:
                return False
            times.append(now)
            return True


def _home(address: str) -> str:
    """
    >>> _home("2001:db8::1") == _home("2001:db8::2"), _home("10.0.0.1") == _home("10.0.0.2")
    (True, False)
    """
    try:
        known = ip_address(address)
    except ValueError:
        return address
    return str(known) if known.version == 4 else str(ip_network((int(known), _IPV6_HOME), strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrance:
    """Where the application is, and who is let in. Without `local` people have accounts."""

    store: Store
    origin: str
    """Scheme, host and port, as browsers write them."""
    hosts: Sequence[str]
    local: LocalEntrance | None = None
    proxies: Sequence[Network] = ()
    """Who may pass requests on, with TLS before them; empty where TLS ends here."""
    logins: Logins = field(default_factory=Logins)

    def visitor(self, headers: Mapping[str, str], cookie: str | None, token: str) -> Visitor | None:
        """Who asks: by the token of the local address, by a machine's bearer token, or by a session."""
        if self.local is not None:
            # compared as bytes: compare_digest takes no text beyond ASCII
            is_known = secrets.compare_digest(token.encode(), self.local.token.encode())
            return Visitor(person=self.local.person, csrf=None) if is_known else None
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme:
            machine = find_bearer(self.store, given.strip()) if scheme.lower() == "bearer" else None
            return None if machine is None else Visitor(person=machine, csrf=None)
        session = None if not cookie else find_session(self.store, cookie)
        return None if session is None else Visitor(person=session[0], csrf=session[1])

    def peer(self, address: str, forwarded_for: str, forwarded_proto: str) -> str | None:
        """The address of who asks; None where the request did not come the safe way.

        Of the addresses that were passed on, the last one that is not a proxy of ours counts: the rest is hearsay.
        """
        if not self.proxies:
            return address
        if not self._is_proxy(address) or forwarded_proto.lower() != "https":
            return None
        for passed in reversed([part.strip() for part in forwarded_for.split(",") if part.strip()]):
            if not self._is_proxy(passed):
                return passed
        return address

    def _is_proxy(self, address: str) -> bool:
        try:
            known = ip_address(address)
        except ValueError:
            return False
        return any(known in network for network in self.proxies)


def parse_proxies(addresses: Sequence[str]) -> tuple[Network, ...]:
    """The trusted addresses of `--behind-proxy`, single ones or networks.

    >>> [str(network) for network in parse_proxies(["127.0.0.1", "10.0.0.0/8"])]
    ['127.0.0.1/32', '10.0.0.0/8']
    """
    networks: list[Network] = []
    for address in addresses:
        try:
            network = ip_network(address)
        except ValueError as error:
            raise ConfigError(f"--behind-proxy {address}: not an address, nor a network such as 10.0.0.0/8") from error
        if network.prefixlen == 0:
            raise ConfigError(f"--behind-proxy {address}: this trusts everybody; name the proxy's own address")
        networks.append(network)
    return tuple(networks)
