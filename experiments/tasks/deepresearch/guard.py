"""Which addresses a page or PDF may be fetched from: public ones only, at the ports of the web (80, 443, 8080, 8443).

An agent names the addresses, and so does whoever wrote the pages that it reads. A host is resolved here, every address
that it has must be public, and the connection is made to the very address that was checked, so that a name that
changes its meaning in between (DNS rebinding) gains nothing. `fetch.py` asks again for every redirect. Other ports are
refused, so that no agent speaks to mail servers, databases and the like, or looks for open ones.

Names beyond ASCII are asked for in the form that the DNS has (IDNA 2008, mapped as UTS 46 says), before anything else
looks at them: digits and dots of other scripts can write an address as well.
"""

from __future__ import annotations

import ipaddress
import socket
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from racelab.experiments.tasks.deepresearch.faults import FaultError

_PORTS: Final = {"http": 80, "https": 443}
_WEB_PORTS: Final = frozenset({80, 443, 8080, 8443})
_NAT64: Final = ipaddress.ip_network("64:ff9b::/96")
_V4_COMPATIBLE: Final = ipaddress.ip_network("::/96")
_MAX_URL: Final = 4096
_MAX_HOST: Final = 253  # of the DNS
_REFUSED: Final = (
    "this address is refused: pages may be read from public http and https addresses only, at the usual ports"
)
_NO_ADDRESS: Final = "this is no web address"

Resolve = Callable[[str, int], Sequence[str]]
"""Host and port -> addresses."""


@dataclass(frozen=True, slots=True)
class Target:
    """A checked address.

    Attributes:
        url: as asked for, without the fragment.
        scheme: http or https.
        host: name that the server is asked for, and whose certificate it must show.
        port: likewise.
        address: to connect to.
        connect_port: to connect to; another than `port` only for an alias.
        path: with the query.
    """

    url: str
    scheme: str
    host: str
    port: int
    address: str
    connect_port: int
    path: str


def public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address is one of the public internet.

    Not: private, loopback, link-local (169.254.169.254 among them), shared, multicast, reserved, unspecified, and IPv6
    addresses that carry an IPv4 address of such a kind (mapped, compatible, 6to4, Teredo, NAT64).
    """
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        inner = _inner(ip)
        if inner:
            return all(public(str(i)) for i in inner)
        if ip.is_site_local:
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


def _inner(ip: ipaddress.IPv6Address) -> tuple[ipaddress.IPv4Address, ...]:
    """The IPv4 addresses that an IPv6 address stands for."""
    if ip.ipv4_mapped is not None:
        return (ip.ipv4_mapped,)
    if ip.sixtofour is not None:
        return (ip.sixtofour,)
    if ip.teredo is not None:
        return ip.teredo
    if (ip in _NAT64 or ip in _V4_COMPATIBLE) and not (ip.is_loopback or ip.is_unspecified):
        return (ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF),)
    return ()


def resolve(host: str, port: int) -> Sequence[str]:
    """Addresses of a host as the system's resolver gives them; it reads 2130706433, 0177.0.0.1 and 127.1 too."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise FaultError("connection", "no such host", absent=True) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def literals_only(host: str, port: int) -> Sequence[str]:
    """A resolver that knows no name: nothing beyond this machine can be reached by one."""
    address = literal(host)
    return [] if address is None else [address]


class Guard:
    """Checks addresses before anything is sent to them."""

    def __init__(
        self,
        allow_hosts: Sequence[str] = (),
        aliases: Mapping[str, tuple[str, int]] | None = None,
        resolve: Resolve = resolve,
    ) -> None:
        """Keeps the exceptions.

        Args:
            allow_hosts: `host`, at every port, or `host:port`: they may be private, and of another port.
            aliases: host -> address and port of a server of this process, which has that name for its pages.
            resolve: the system's resolver, or a test's.
        """
        self._allowed = frozenset(_entry(entry) for entry in allow_hosts)
        self._aliases = dict(aliases or {})
        self._resolve = resolve

    def check(self, url: str) -> Target:
        """The address to connect to.

        Raises:
            FaultError: `refused_address`, or `connection` where there is no such host.
        """
        self.screen(url)
        parts = _split(url)
        alias = self._aliases.get(parts.host)
        if alias is not None:
            return replace(parts, address=alias[0], connect_port=alias[1])
        found = self._resolve(parts.host, parts.port)
        if not found:
            raise FaultError("connection", "no such host", absent=True)
        if not self._excepted(parts) and not all(public(a) for a in found):
            raise FaultError("refused_address", _REFUSED)
        return replace(parts, address=found[0])

    def screen(self, url: str) -> None:
        """What can be refused without asking a name server, before another service is asked to fetch the page.

        Raises:
            FaultError: `refused_address`: no http address, another port, or a literal address that is not public.
        """
        parts = _split(url)
        if parts.host in self._aliases or self._excepted(parts):
            return
        address = literal(parts.host)
        local = parts.host == "localhost" or parts.host.endswith((".localhost", ".local", ".internal"))
        other = parts.port not in _WEB_PORTS
        if local or other or (address is not None and not public(address)):
            raise FaultError("refused_address", _REFUSED)

    def _excepted(self, parts: Target) -> bool:
        host = _bracketed(parts.host)
        return bool({parts.host, host, f"{host}:{parts.port}"} & self._allowed)


def _split(url: str) -> Target:
    """The parts of an http address; no address to connect to yet."""
    url = url.strip()
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = _ascii((parts.hostname or "").lower()).rstrip("."), parts.port
    except ValueError:  # UnicodeError, and with it what `idna` raises, is one
        raise FaultError("refused_address", _NO_ADDRESS) from None
    scheme = parts.scheme.lower()
    if scheme not in _PORTS or not host or len(url) > _MAX_URL or len(host) > _MAX_HOST:
        raise FaultError("refused_address", _REFUSED)
    odd = any(c.isspace() or ord(c) < 32 for c in url) or any(c in parts.netloc for c in "\\%@")
    if odd or port == 0:  # a user or password in front of the host hides which host is meant
        raise FaultError("refused_address", _NO_ADDRESS)
    number = port or _PORTS[scheme]
    path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
    return Target(parts._replace(fragment="").geturl(), scheme, host, number, "", number, path)


def _ascii(host: str) -> str:
    """The host as the DNS has it.

    Raises:
        ValueError: it has no such form.
    """
    if host.isascii():
        return host
    if len(host) > _MAX_HOST:
        raise ValueError("too long")
    import idna  # of httpx, without which nothing is fetched

    return idna.encode(host, uts46=True).decode("ascii")


def _entry(allowed: str) -> str:
    """An entry of `allow_hosts` in the form that hosts are compared in; as it stands if it can never be met."""
    host, colon, port = allowed.strip().lower().partition(":")
    try:
        return f"{_ascii(host)}{colon}{port}"
    except ValueError:
        return allowed


def literal(host: str) -> str | None:
    """The address that a host is written as, in any of the forms that resolvers read; None for a name."""
    try:
        return str(ipaddress.ip_address(host.partition("%")[0]))
    except ValueError:
        pass
    try:
        return socket.inet_ntoa(socket.inet_aton(host))
    except (OSError, UnicodeError):
        return None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def host_header(target: Target) -> str:
    """`host`, or `host:port` for a port that is not the scheme's own."""
    host = _bracketed(target.host)
    return host if target.port == _PORTS[target.scheme] else f"{host}:{target.port}"


def connect_url(target: Target) -> str:
    """The address with the checked IP in place of the name."""
    return f"{target.scheme}://{_bracketed(target.address)}:{target.connect_port}{target.path}"
