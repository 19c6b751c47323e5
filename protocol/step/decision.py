"""Signing and checking of decisions (STEP_OPEN) and of a data node's word (STEP_CLOSE)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgpack

from protocol.errors import ProtocolViolation
from protocol.keys import NodeKey, PeerId, is_signed_by
from protocol.messages import Decision, Entry, Share, StepClose, StepOpen, Vote


def decision_bytes(decision: Decision) -> bytes:
    """Return the bytes that an authority signs."""
    return b"shoal/step-open/1" + _canonical(decision.model_dump(mode="json"))


def vote(decision: Decision, key: NodeKey) -> Vote:
    """Sign a decision as one of the authorities."""
    return Vote(authority=key.peer_id, signature=key.sign(decision_bytes(decision)))


def majority(authorities: Sequence[PeerId]) -> int:
    """Return how many votes make a decision."""
    return len(authorities) // 2 + 1


def check_step_open(message: StepOpen, swarm: str, authorities: Sequence[PeerId]) -> Decision:
    """Return the decision if a majority of the authorities signed it, else ProtocolViolation."""
    decision = message.decision
    if decision.swarm != swarm:
        raise ProtocolViolation("a decision of another swarm")
    votes = {v.authority: v.signature for v in message.votes if v.authority in authorities}
    if len(votes) < len(message.votes):  # nobody honest sends what costs a check and counts nothing
        raise ProtocolViolation("STEP_OPEN carries votes of strangers, or two of one authority")
    data = decision_bytes(decision)
    valid = {peer for peer, signature in votes.items() if is_signed_by(peer, data, signature)}
    if len(valid) < majority(authorities):
        raise ProtocolViolation(
            f"STEP_OPEN {decision.order} has {len(valid)} of {majority(authorities)} votes"
        )
    return decision


def commonest(digests: Mapping[PeerId, str]) -> str:
    """The digest most nodes hold; among equals, that of the lowest PeerID."""
    counts = Counter(digests.values())
    return max(counts, key=lambda d: (counts[d], [-ord(c) for c in min(_holders(digests, d))]))


def _holders(digests: Mapping[PeerId, str], digest: str) -> list[PeerId]:
    return [p for p, d in digests.items() if d == digest]


def sign_close(
    swarm: str, step: int, entries: Sequence[Entry], key: NodeKey, begun: int = 0
) -> StepClose:
    """Make a data node's signed list of what counts in a step."""
    entries = tuple(sorted(entries, key=lambda e: e.slot))
    signature = key.sign(_close_bytes(swarm, step, begun, key.peer_id, entries))
    return StepClose(
        step=step, begun=begun, data_node=key.peer_id, entries=entries, signature=signature
    )


def check_close(close: StepClose, swarm: str) -> None:
    """Raise ProtocolViolation unless the data node named in it signed it, each slot once."""
    data = _close_bytes(swarm, close.step, close.begun, close.data_node, close.entries)
    if not is_signed_by(close.data_node, data, close.signature):
        raise ProtocolViolation("a STEP_CLOSE that its data node did not sign")
    if len({e.slot for e in close.entries}) != len(close.entries):
        raise ProtocolViolation("a STEP_CLOSE that names a slot twice")


def share_slots(quota: int, data_nodes: Sequence[PeerId]) -> tuple[Share, ...]:
    """Deal the slots 0..quota-1 to the data nodes in turn."""
    return tuple(
        Share(data_node=peer, slots=tuple(range(i, quota, len(data_nodes))))
        for i, peer in enumerate(data_nodes)
    )


def _close_bytes(
    swarm: str, step: int, begun: int, data_node: PeerId, entries: Sequence[Entry]
) -> bytes:
    listed = [[e.slot, e.attempt, list(e.path), e.loss] for e in entries]
    return b"shoal/step-close/1" + _canonical([swarm, step, begun, data_node, listed])


def _canonical(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
