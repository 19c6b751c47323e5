"""A swarm as the leading authority sees it, for the tests of the membership rules."""

from __future__ import annotations

from step_kit import PEERS, SWARM, decision_of, digest_of, manifest_of

from protocol.deadlines import Deadlines
from protocol.keys import PeerId
from protocol.messages import Decision, Prepared, Presence, Suspect
from protocol.step.membership import Membership

LIMITS = Deadlines()
SILENCE_S, GRACE_S = LIMITS.session_silence_s, LIMITS.reconnect_grace_s
# Two data nodes and two stages of two holders; the others are outside at first.
ROSTER = [PEERS[0:2], PEERS[2:4], PEERS[4:6]]
JOINER, OTHER = PEERS[8], PEERS[9]


def presence(stage: int, /, **changes: object) -> Presence:
    fields: dict[str, object] = {"step": 0, "stage": stage, "capacity": 4, "seen": (0, 1)}
    fields["digest"] = digest_of(str(stage)) if stage >= 0 else None
    return Presence.model_validate(fields | changes)


def empty(**options: int) -> Membership:
    return Membership(manifest_of(**options), SWARM, LIMITS)


def running(roster=ROSTER, *, step: int = 0, term: int = 1, **options: int) -> Membership:
    """A swarm in which everybody was seen at time 0."""
    rules = empty(**options)
    decision = decision_of(roster, step=step, term=term)
    for stage, holders in enumerate(roster):
        for peer in holders:
            rules.on_presence(peer, presence(stage, step=step, seen=(step, term)), 0.0)
    rules.on_decided(decision)
    return rules


def join(rules: Membership, peer: PeerId, stage: int, now: float = 0.0, **changes: object) -> None:
    assert rules.current is not None
    step, seen = rules.current.step, rules.current.order
    rules.on_presence(peer, presence(stage, step=step, seen=seen, **changes), now)


def prepare(rules: Membership, *peers: PeerId, digest: str = "next") -> None:
    current = rules.current
    assert current is not None
    for peer in peers or current.members:
        stage = current.stage_of(peer)
        text = f"{digest}{stage}"
        rules.on_prepared(
            peer,
            Prepared(
                step=current.step, term=current.term, stage=stage or 0, digest=digest_of(text)
            ),
        )


def suspect(rules: Membership, by: PeerId, peer: PeerId, now: float = 0.0, term: int = 1) -> bool:
    return rules.on_suspect(by, Suspect(step=0, term=term, peer=peer, reason="test"), now)


def proposed(rules: Membership, now: float = 0.0) -> Decision:
    """What is decided now, or a moment later: in step 0 several joiners are let in together."""
    decision = rules.propose(now) or rules.propose(now + LIMITS.presence_s)
    assert decision is not None
    return decision
