"""Our side of making a session: addresses, dials in progress, pauses between failed ones."""

from __future__ import annotations

import random
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import trio

from node.transport.greeting import Greeter, Refused
from node.transport.host import STRANGER_FAULTS, HardenedHost
from node.transport.muxer import Muxer
from node.transport.stream import MuxedStream
from protocol.deadlines import Deadlines
from protocol.errors import PeerError, PeerGone
from protocol.keys import PeerId
from protocol.messages import Lane as LaneName

LANES: tuple[LaneName, ...] = ("control", "bulk")

# Records cost nothing to make: beyond these the addresses that were told longest ago are forgotten.
MOST_KNOWN = 4096
# The pause doubles with each failure up to this multiple of ``redial_backoff_s``.
_MAX_DOUBLINGS = 3


@dataclass(eq=False)
class Dial:
    """One attempt to get a session with a peer, by our dial or by accepting the peer's.

    ``has_greeted`` is set before our hello is written: from then on a simultaneous dial of the
    peer is decided by PeerID order, because the peer may have accepted ours already.
    """

    peer: PeerId
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    has_greeted: bool = False
    established: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)
    failure: PeerGone | None = None


class AddressBook:
    """Where peers listen, the address that worked last first, and when to try again."""

    def __init__(self, backoff_s: float, rng: random.Random) -> None:
        self._backoff_s, self._rng = backoff_s, rng
        self._addresses: dict[PeerId, tuple[str, ...]] = {}
        self._failures: dict[PeerId, int] = {}
        self._not_before: dict[PeerId, float] = {}
        self._pinned: frozenset[PeerId] = frozenset()

    def pin(self, peers: Collection[PeerId]) -> None:
        """Never forget these."""
        self._pinned = frozenset(peers)

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Replace what is known; another set of addresses may be tried at once."""
        known = self._addresses.pop(peer, ())
        is_news = set(addresses) != set(known)
        self._addresses[peer] = tuple(addresses) if is_news else known
        if is_news:
            self._forget_failures(peer)
        if len(self._addresses) > MOST_KNOWN + len(self._pinned):
            oldest = next(known for known in self._addresses if known not in self._pinned)
            del self._addresses[oldest]
            self._forget_failures(oldest)

    def of(self, peer: PeerId) -> tuple[str, ...]:
        """The addresses to try, in order."""
        return self._addresses.get(peer, ())

    def pause_s(self, peer: PeerId) -> float:
        """How long a dial must still wait after earlier failures."""
        return max(0.0, self._not_before.get(peer, 0.0) - trio.current_time())

    def succeeded(self, peer: PeerId, address: str) -> None:
        """Try this address first from now on."""
        others = (known for known in self.of(peer) if known != address)
        self._addresses[peer] = (address, *others)
        self._forget_failures(peer)

    def failed(self, peer: PeerId) -> None:
        """Wait before the next dial, longer each time, by a random part of the pause."""
        doublings = min(self._failures.get(peer, 0), _MAX_DOUBLINGS)
        self._failures[peer] = doublings + 1
        pause_s = self._backoff_s * 2.0**doublings * self._rng.uniform(0.5, 1.0)
        self._not_before[peer] = trio.current_time() + pause_s

    def _forget_failures(self, peer: PeerId) -> None:
        self._failures.pop(peer, None)
        self._not_before.pop(peer, None)


@dataclass(frozen=True)
class Meeting:
    """Two greeted streams: what a session is made of."""

    peer: PeerId
    streams: dict[LaneName, MuxedStream]
    is_dialler: bool
    clock_offset_s: float


class Dialler:
    """Makes meetings with peers whose addresses are in the book."""

    def __init__(
        self, host: HardenedHost, greeter: Greeter, book: AddressBook, deadlines: Deadlines
    ) -> None:
        self._host, self._greeter, self._book = host, greeter, book
        self._deadlines = deadlines

    async def dial(self, dial: Dial) -> Meeting | None:
        """Try the addresses in turn; None if the peer's own dial is to be waited for.

        Raises PeerGone with what happened at each address.
        """
        addresses = self._book.of(dial.peer)
        share_s = self._deadlines.dial_s / len(addresses)
        errors: list[str] = []
        for address in addresses:
            try:
                with trio.fail_after(share_s):
                    meeting = await self._meet(dial, address)
            except Refused as refused:
                if refused.refusal == "dialling":
                    return None
                raise
            except (PeerError, *STRANGER_FAULTS) as error:
                errors.append(f"{address}: {_describe(error)}")
            else:
                self._book.succeeded(dial.peer, address)
                return meeting
        raise PeerGone("; ".join(errors))

    async def _meet(self, dial: Dial, address: str) -> Meeting:
        session = secrets.token_bytes(16)
        muxers: list[Muxer] = []
        streams: dict[LaneName, MuxedStream] = {}
        try:
            for lane in LANES:
                muxers.append(await self._host.connect(dial.peer, address))
                stream = await self._host.open_stream(muxers[-1])
                dial.has_greeted = True
                ack = await self._greeter.greet(stream, session, lane)
                streams[lane] = stream
            return Meeting(dial.peer, streams, True, self._greeter.offset_s(ack))
        finally:
            if len(streams) < len(LANES):
                for muxer in muxers:
                    muxer.abort()


def _describe(error: Exception) -> str:
    if isinstance(error, trio.TooSlowError):
        return "no answer in time"
    return str(error) or type(error).__name__
