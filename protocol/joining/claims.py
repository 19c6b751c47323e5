"""Claims: who gives way when several nodes want to go to the same stage at the same time.

A claim is a promise in a signed record, so nobody can claim for another; it has a lease, so that
who vanished blocks nobody. Whoever claims, waits a moment and looks again: of those that saw each
other, the one with the higher rank gives way. The rank is a hash of the peer and the claim's
epoch, so that it is not always the same node that gives way.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from protocol.keys import PeerId
from protocol.records import MAX_LIFETIME_S, Claim


@dataclass(frozen=True, slots=True)
class Rival:
    """Another newcomer that claims a stage, with what it would bring there."""

    peer: PeerId
    claim: Claim
    capacity: int

    @property
    def rank(self) -> str:
        """Where it stands in the order of those who claim at the same time."""
        return rank(self.peer, self.claim.epoch)


def rank(peer: PeerId, epoch: int) -> str:
    """The order of those who claim at the same time: the higher one gives way."""
    return sha256(f"{peer}/{epoch}".encode()).hexdigest()


def epoch_of(wall_s: float, lease_s: float) -> int:
    """The epoch of a claim that is made now."""
    return int(wall_s // lease_s)


def is_live(claim: Claim, wall_s: float) -> bool:
    """Whether a claim counts: it has not expired, and does not pretend to last for ever."""
    return wall_s < claim.expires_at <= wall_s + MAX_LIFETIME_S
