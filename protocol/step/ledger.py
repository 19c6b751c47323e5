"""What counts in a step, at one member: each microbatch exactly once (GWTF spec 1.4, rule 2).

A weight gradient is kept apart until its data node's COMMIT, or in the end its STEP_CLOSE, names
the holder. The closes are the authority: what they list and no holder of the stage has in its
sums is missing and is recomputed by the member that ``assignments`` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.errors import ProtocolViolation
from protocol.keys import PeerId
from protocol.messages import Decision, Entry, LedgerEntry, StepClose, WorkId

SlotId = tuple[PeerId, int]


@dataclass(slots=True)
class StepLedger:
    """The commits of one member in one step, and the closes it has seen."""

    me: PeerId
    stage: int
    step: int
    committed: dict[SlotId, int] = field(default_factory=dict)
    closes: dict[PeerId, StepClose] = field(default_factory=dict)

    def has_room_for(self, work: WorkId) -> bool:
        """Whether this slot is not in the sums yet."""
        return (work.data_node, work.slot) not in self.committed

    def commit(self, work: WorkId) -> None:
        """Note that the gradient of this microbatch is in the sums."""
        slot = (work.data_node, work.slot)
        if slot in self.committed:
            raise ProtocolViolation(f"slot {work.slot} of {work.data_node} committed twice")
        self.committed[slot] = work.attempt

    def on_close(self, close: StepClose, decision: Decision) -> bool:
        """Keep a close that lists just the share of its data node; return whether it is new.

        The first one stands, unless the share was dealt anew since.
        """
        if (close.step, close.begun) != (self.step, decision.begun):
            return False
        if not _covers_share(close, decision):
            return False
        known = self.closes.get(close.data_node)
        if known is not None and _covers_share(known, decision):
            return False
        self.closes[close.data_node] = close
        return True

    def names_me(self, data_node: PeerId, path: Sequence[PeerId]) -> bool:
        """Whether a path names this member as the one whose gradient counts."""
        if self.stage == 0:
            return data_node == self.me
        return self.stage <= len(path) and path[self.stage - 1] == self.me

    def missing_closes(self, decision: Decision) -> set[PeerId]:
        """The data nodes that draw slots and have not closed yet."""
        closed = {p for p, close in self.closes.items() if _covers_share(close, decision)}
        return set(drawing_nodes(decision)) - closed

    def expected(self, decision: Decision) -> dict[SlotId, Entry]:
        """All that counts under this decision: the union of the closes of its shares."""
        return {
            (peer, entry.slot): entry
            for peer, close in self.closes.items()
            if _covers_share(close, decision)
            for entry in close.entries
        }

    def unsettled(self, expected: Mapping[SlotId, Entry]) -> list[WorkId]:
        """Entries that name me and whose COMMIT I have not seen."""
        return [
            WorkId(self.step, data_node, slot, entry.attempt)
            for (data_node, slot), entry in expected.items()
            if (data_node, slot) not in self.committed and self.names_me(data_node, entry.path)
        ]

    def unexpected(self, expected: Mapping[SlotId, Entry], decision: Decision) -> list[SlotId]:
        """Commits of data nodes that draw slots, which their closes do not list."""
        drawing = drawing_nodes(decision)
        return [
            slot for slot in list(self.committed) if slot not in expected and slot[0] in drawing
        ]

    def entries(self, expected: Mapping[SlotId, Entry]) -> tuple[LedgerEntry, ...]:
        """What my sums contain of what counts, for the other holders of the stage."""
        return tuple(
            LedgerEntry(data_node=peer, slot=slot, attempt=attempt)
            for (peer, slot), attempt in sorted(self.committed.items())
            if (peer, slot) in expected
        )


def drawing_nodes(decision: Decision) -> tuple[PeerId, ...]:
    """The data nodes that have slots to draw, in PeerID order: whose sums count in the step.

    One that left and came back within the step has none; what it drew before is void.
    """
    return tuple(sorted(share.data_node for share in decision.shares if share.slots))


def _covers_share(close: StepClose, decision: Decision) -> bool:
    share = next((s.slots for s in decision.shares if s.data_node == close.data_node), ())
    num_stages = len(decision.roster) - 1
    return (
        bool(share)
        and {entry.slot for entry in close.entries} == set(share)
        and all(len(entry.path) == num_stages for entry in close.entries)
    )


def assignments(
    expected: Iterable[SlotId],
    ledgers: Mapping[PeerId, Iterable[SlotId]],
) -> dict[SlotId, PeerId]:
    """Deal what nobody has to the members in turn, the same on every member."""
    members = sorted(ledgers)
    present = {slot for slots in ledgers.values() for slot in slots}
    missing = sorted(set(expected) - present)
    return {slot: members[i % len(members)] for i, slot in enumerate(missing)}


def duplicates(ledgers: Mapping[PeerId, Iterable[SlotId]]) -> dict[SlotId, list[PeerId]]:
    """Slots that several members have in their sums, with these members in PeerID order."""
    owners: dict[SlotId, list[PeerId]] = {}
    for member in sorted(ledgers):
        for slot in ledgers[member]:
            owners.setdefault(slot, []).append(member)
    return {slot: peers for slot, peers in owners.items() if len(peers) > 1}
