"""How much a peer may make this node do: frames of a session, and connections of an address."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import trio

from protocol.errors import ProtocolViolation
from protocol.keys import PeerId
from protocol.wire import Prefix

# A token is about the work of one small message, or of a KiB of header: some 50 microseconds.
STRANGER_RATE, STRANGER_BURST = 200.0, 4000.0
MEMBER_RATE, MEMBER_BURST = 2000.0, 20_000.0
SESSION_TOKENS = 50.0
_HEADER_BYTES_PER_TOKEN = 1024
_STRANGER_BYTES_PER_TOKEN = 64 * 1024
# A member's tensors are work that was asked for: a frame of so many bytes costs nothing.
_FREE_BYTES = 16 * 1024
_MOST_REMEMBERED = 4096

CONNECTION_RATE, CONNECTION_BURST = 16.0, 256.0
_MOST_ADDRESSES = 4096


@dataclass(slots=True)
class Bucket:
    """Tokens that come back at ``rate`` a second, up to ``burst``. Times are monotonic."""

    rate: float
    burst: float
    spare: float
    at: float

    def refill(self, now: float) -> None:
        """Add what came back since."""
        self.spare = min(self.burst, self.spare + self.rate * (now - self.at))
        self.at = now

    def spend(self, tokens: float, now: float) -> bool:
        """Take tokens; False if there are not as many."""
        self.refill(now)
        if self.spare < tokens:
            return False
        self.spare -= tokens
        return True


class Allowance:
    """What one peer may send. It outlives sessions, so that a new one brings nothing new."""

    def __init__(self, is_member: bool) -> None:
        self.is_member = is_member
        now = trio.current_time()
        rate, burst = self._limits
        self._bucket = Bucket(rate, burst, burst, now)

    @property
    def _limits(self) -> tuple[float, float]:
        member, stranger = (MEMBER_RATE, MEMBER_BURST), (STRANGER_RATE, STRANGER_BURST)
        return member if self.is_member else stranger

    def change(self, is_member: bool) -> None:
        """The peer came into the swarm's decision, or left it."""
        if is_member != self.is_member:
            self.is_member = is_member
            self._bucket.refill(trio.current_time())
            spent = self._bucket.burst - self._bucket.spare
            self._bucket.rate, self._bucket.burst = self._limits
            self._bucket.spare = max(0.0, self._bucket.burst - spent)

    def take(self, prefix: Prefix) -> None:
        """Pay for a frame that is about to be read; ProtocolViolation if the peer floods us."""
        tokens = 1 + prefix.header_bytes / _HEADER_BYTES_PER_TOKEN
        if self.is_member:
            tokens = max(0.0, tokens - prefix.payload_bytes / _FREE_BYTES)
        else:
            tokens += prefix.payload_bytes / _STRANGER_BYTES_PER_TOKEN
        if not self._bucket.spend(tokens, trio.current_time()):
            raise ProtocolViolation("sends more than this node can take")

    def earn(self) -> None:
        """This node sent the peer a message, which it may answer or acknowledge."""
        self._bucket.spare = min(self._bucket.burst, self._bucket.spare + 1)

    def begin_session(self) -> bool:
        """Pay for a session; False while the peer has spent what it may."""
        return self._bucket.spend(SESSION_TOKENS, trio.current_time())


class Allowances:
    """Those of all peers that were heard of lately; until ``expect`` is called all are members."""

    def __init__(self) -> None:
        self._of: OrderedDict[PeerId, Allowance] = OrderedDict()
        self._expected: frozenset[PeerId] | None = None

    def expect(self, peers: Collection[PeerId]) -> None:
        """These are whom the swarm's decision counts on."""
        self._expected = frozenset(peers)
        for peer, allowance in self._of.items():
            allowance.change(self.is_expected(peer))

    def is_expected(self, peer: PeerId) -> bool:
        """Whether a peer is one of them."""
        return self._expected is None or peer in self._expected

    def of(self, peer: PeerId) -> Allowance:
        """The allowance of a peer."""
        allowance = self._of.get(peer)
        if allowance is None:
            allowance = self._of[peer] = Allowance(self.is_expected(peer))
        self._of.move_to_end(peer)
        while len(self._of) > _MOST_REMEMBERED:
            self._of.popitem(last=False)
        return allowance


class Door:
    """Limits the connections that one address makes, before anything is computed for them."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._of: OrderedDict[str, Bucket] = OrderedDict()

    def lets_in(self, ip: str) -> bool:
        """Whether one more connection of this address is looked at now."""
        now, network = self._clock(), _network(ip)
        bucket = self._of.get(network)
        if bucket is None:
            bucket = self._of[network] = Bucket(
                CONNECTION_RATE, CONNECTION_BURST, CONNECTION_BURST, now
            )
        self._of.move_to_end(network)
        while len(self._of) > _MOST_ADDRESSES:
            self._of.popitem(last=False)
        return bucket.spend(1, now)


def _network(ip: str) -> str:
    """What one owner has: an IPv4 address, or the 64 bits that an IPv6 host may vary."""
    try:
        address = ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return str(address)
