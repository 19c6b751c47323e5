"""The way into a swarm: finds a seed and the manifest, and tells what stands in the way.

A stranger must not be able to turn a node away. So only two witnesses count: the organiser, whom
the invite names and who proves to be it, and whoever proves to have this node's own key.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection

import trio

from node.sidecar.registry import SidecarRegistry
from node.sidecar.supervisor import Sidecar
from node.transport.greeting import CLOCK_REFUSE_S, CLOCK_WARN_S
from node.transport.probe import Answered, Prober
from protocol.deadlines import Deadlines
from protocol.errors import (
    ClockError,
    IdentityError,
    ShoalError,
    SidecarError,
    Unreachable,
    VersionMismatch,
)
from protocol.invite import Invite
from protocol.keys import PeerId
from protocol.manifest import SignedManifest
from protocol.messages import PROTOCOL_VERSION
from protocol.ports import Observer
from protocol.records import NodeRecord

_TWIN_HINT = "Stop that node, or give this one a key of its own: another --state."


class Entrance:
    """Leads one node into its swarm; the organiser, who has no invite, is there already."""

    def __init__(
        self,
        peer_id: PeerId,
        invite: Invite | None,
        sidecar: Sidecar,
        registry: SidecarRegistry,
        prober: Prober,
        deadlines: Deadlines,
        observer: Observer,
        *,
        retries: bool = True,
    ) -> None:
        self._peer_id, self._invite = peer_id, invite
        self._sidecar, self._registry, self._prober = sidecar, registry, prober
        self._deadlines, self._observer = deadlines, observer
        self._retries = retries
        self._twins = TwinWatch(observer)

    async def find_manifest(self, known: SignedManifest | None) -> SignedManifest:
        """Return the manifest, ``known`` or fetched, once a seed has answered.

        Goes on for ever; without retries it raises Unreachable.
        """
        if known is not None and self._invite is None:
            return known
        pause_s, began = self._deadlines.redial_backoff_s, trio.current_time()
        while True:
            try:
                await self._sidecar.wait_joined(self._deadlines.sidecar_call_s)
                return known or await self._registry.fetch_manifest()
            except (Unreachable, SidecarError) as error:
                self._tell(error, trio.current_time() - began, pause_s)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._deadlines.request_s)

    def _tell(self, error: ShoalError, waited_s: float, pause_s: float) -> None:
        # it takes a moment until the side-car knows others: only then is it a problem
        if waited_s < self._deadlines.sidecar_call_s:
            self._observer.event("swarm_awaited", next_try_s=round(pause_s, 1))
        elif not self._retries:
            raise Unreachable(error.cause)
        else:
            next_s = round(pause_s, 1)
            cause = f"{error.cause}; tried for {waited_s:.0f} s, next try in {next_s:g} s"
            self._observer.event(
                "swarm_awaited", code=Unreachable.code, cause=cause, hint=Unreachable.default_hint
            )

    async def refuse_twin(self) -> None:
        """Raise IdentityError if another process runs with this node's key; call it at the start.

        Nothing was published yet: whatever the DHT has under this key is an earlier life's or a
        twin's, and only a twin can prove at that address to have the key.
        """
        try:
            records = await self._registry.nodes()
        except SidecarError:
            return
        for record in records:
            if record.peer_id == self._peer_id:
                found = await self._prober.greet(self._peer_id, record.addresses)
                if found is not None:
                    raise twin_error(found.address)
                self._twins.was_there(record)
        self._registry.on_foreign = self._twins.judge

    async def ask_organiser(self, is_in: Callable[[], bool]) -> None:
        """Ask the organiser's node what a retry cannot mend, until it answers or ``is_in()``.

        Raises VersionMismatch or ClockError, and IdentityError if it has our own key: its side-car
        is then unreachable for ours, which has the same PeerID.
        """
        invite, pause_s = self._invite, self._deadlines.redial_backoff_s
        while invite is not None and not is_in():
            found = await self._prober.greet(invite.organiser, invite.nodes)
            if found is not None:
                if invite.organiser == self._peer_id:
                    raise twin_error(found.address)
                judge_answer(found)
                return
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._deadlines.request_s)


def judge_answer(found: Answered) -> None:
    """Raise what the organiser's answer means for this node."""
    if found.refusal == "version":
        raise VersionMismatch(
            f"the organiser's node speaks another protocol version than {PROTOCOL_VERSION}"
        )
    offset_s = found.clock_offset_s
    if abs(offset_s) > CLOCK_REFUSE_S:
        raise ClockError(f"this computer's clock is {_off(offset_s)} the organiser's")


def twin_error(address: str) -> IdentityError:
    """The key is in use elsewhere; ``address`` says where."""
    return IdentityError(f"another node runs with this node's key at {address}", _TWIN_HINT)


class TwinWatch:
    """Judges records under this node's key that this process did not sign.

    A twin that could not be dialled at the start gives itself away by new records: if an older
    one of its was there before us, we are the second. Else the other came later, and is told so.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._before: NodeRecord | None = None
        self._is_told = False
        self._started_ms = int(time.time() * 1000)

    def was_there(self, record: NodeRecord) -> None:
        """Take note of a record that was there at the start and whose signer did not answer."""
        self._before = record

    def judge(self, record: NodeRecord) -> None:
        """Take note of a record that appeared; raise IdentityError if its signer was here first."""
        earlier = self._before.sequence if self._before else 0
        if record.sequence <= max(self._started_ms, earlier):
            return  # of our own earlier life, or sent again by a stranger
        if self._before is not None:
            raise twin_error(_first_of(record.addresses))
        if not self._is_told:
            self._is_told = True
            cause = f"another node runs with this node's key at {_first_of(record.addresses)}"
            self._observer.event(
                "identity_used_twice", code=IdentityError.code, cause=cause, hint=_TWIN_HINT
            )


def _first_of(addresses: Collection[str]) -> str:
    return next(iter(addresses), "an unknown address")


class ClockWatch:
    """Warns once while this computer's clock is off the middle of its peers' clocks."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._is_told = False

    def look(self, offsets_s: Collection[float]) -> None:
        """``offsets_s`` are how far the peers' clocks are ahead of ours."""
        middle_s = statistics.median(offsets_s) if offsets_s else 0.0
        self._observer.gauge("clock_offset_seconds", middle_s)
        is_off = abs(middle_s) > CLOCK_WARN_S
        if is_off and not self._is_told:
            cause = f"this computer's clock is {_off(middle_s)} those of its peers"
            self._observer.event(
                "clock_was_off", code=ClockError.code, cause=cause, hint=ClockError.default_hint
            )
        self._is_told = is_off


def _off(offset_s: float) -> str:
    return f"{abs(offset_s):.0f} s {'behind' if offset_s > 0 else 'ahead of'}"
