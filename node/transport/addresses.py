"""Where a node listens: the lock on its port and the addresses that others can dial."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil
from multiaddr import Multiaddr

from protocol.errors import ConfigError, ResourceError
from protocol.keys import PeerId


def endpoint(address: str) -> tuple[str, int]:
    """Return (ip, port) of a TCP listen address such as ``/ip4/0.0.0.0/tcp/4001``."""
    try:
        multiaddr = Multiaddr(address)
        names = [protocol.name for protocol in multiaddr.protocols()]
        if len(names) != 2 or names[0] not in ("ip4", "ip6") or names[1] != "tcp":
            raise ValueError(f"its parts are {names}")
        return str(multiaddr.value_for_protocol(names[0])), int(multiaddr.value_for_protocol("tcp"))
    except ValueError as error:
        raise ConfigError(f"{address!r} is not a listen address: {error}") from error


@contextmanager
def ports_held(addresses: Sequence[str]) -> Iterator[None]:
    """Hold each address for this process; ResourceError if another one has it.

    libp2p listens with SO_REUSEPORT, which lets two daemons share a port and split its
    connections. An abstract socket is a lock that the kernel drops with the process.
    """
    with ExitStack() as stack:
        for ip, port in map(endpoint, addresses):
            _probe(ip, port)
            if port:
                lock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                _bind(lock, f"\0shoal/{ip}/{port}", f"port {port} of {ip}")
        yield


def refuse_taken(ip: str, port: int) -> None:
    """Raise ResourceError if anybody listens on a port that this node is to have."""
    if port:
        _probe(ip, port)


def _probe(ip: str, port: int) -> None:
    """Bind without SO_REUSEPORT for a moment: that fails if anybody listens there."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, (ip, port), f"port {port} of {ip}")


def _bind(sock: socket.socket, address: str | tuple[str, int], what: str) -> None:
    try:
        sock.bind(address)
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        hint = (
            "Stop the other program, or set another listen_port, dht_port or metrics_port."
            if is_taken
            else None
        )
        cause = f"{what} is already in use" if is_taken else f"{what} cannot be used: {error}"
        raise ResourceError(cause, hint) from error


def dialable(
    listening: Iterable[Multiaddr], peer: PeerId, announced: str | None = None
) -> tuple[str, ...]:
    """Return the addresses to publish: wildcards become interface addresses, loopback last.

    ``announced`` replaces every IPv4 address: the owner knows better, behind a forwarded port.
    """
    found: list[tuple[bool, str]] = []
    for address in listening:
        ip, port = endpoint(str(address).partition("/p2p/")[0])
        family = "ip6" if ":" in ip else "ip4"
        for real in [announced] if announced and family == "ip4" else _reachable(ip, family):
            is_loopback = ipaddress.ip_address(real).is_loopback
            found.append((is_loopback, f"/{family}/{real}/tcp/{port}/p2p/{peer}"))
    return tuple(dict.fromkeys(address for _, address in sorted(found, key=lambda pair: pair[0])))


def _reachable(ip: str, family: str) -> list[str]:
    if not ipaddress.ip_address(ip).is_unspecified:
        return [ip]
    wanted = socket.AF_INET6 if family == "ip6" else socket.AF_INET
    every = (entry for entries in psutil.net_if_addrs().values() for entry in entries)
    # a link-local address (with its %scope) means nothing on another machine
    return [e.address for e in every if e.family == wanted and "%" not in e.address]
