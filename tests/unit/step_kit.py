"""Keys, manifests and decisions that the tests of the step's rules share."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from protocol.keys import NodeKey, PeerId
from protocol.manifest import (
    DataSpec,
    Manifest,
    ModelSpec,
    OptimizerSpec,
    PipelineSpec,
    RecoverySpec,
    TrainingSpec,
)
from protocol.messages import Decision, Entry, Share
from protocol.step.decision import share_slots

KEYS = sorted((NodeKey(bytes([n]) * 32) for n in range(1, 13)), key=lambda key: key.peer_id)
PEERS: list[PeerId] = [key.peer_id for key in KEYS]
SWARM = "ab" * 32


def digest_of(text: str) -> str:
    """A state's digest with a name."""
    return sha256(text.encode()).hexdigest()


def manifest_of(
    num_stages: int = 2,
    *,
    steps: int = 3,
    quota: int = 4,
    authorities: int = 1,
    recovery: str = "none",
    **pipeline: int,
) -> Manifest:
    """A manifest whose authorities are the first keys."""
    return Manifest(
        name="rules",
        organiser=PEERS[0],
        authorities=tuple(PEERS[:authorities]),
        model=ModelSpec(
            layers=num_stages,
            width=4,
            heads=1,
            kv_heads=1,
            feed_forward=4,
            vocabulary=256,
            context=1,
        ),
        pipeline=PipelineSpec(stages=num_stages, **pipeline),
        training=TrainingSpec(
            steps=steps, quota=quota, microbatch=1, optimizer=OptimizerSpec(name="sgd")
        ),
        data=DataSpec(eval_every=0),
        recovery=RecoverySpec(method=recovery),
    )


def decision_of(
    roster: Sequence[Sequence[PeerId]],
    *,
    step: int = 0,
    term: int = 1,
    quota: int = 4,
    shares: tuple[Share, ...] | None = None,
    **changes: object,
) -> Decision:
    """A decision in which stage k starts from the digest of "k"."""
    return Decision.model_validate(
        {
            "swarm": SWARM,
            "step": step,
            "term": term,
            "ballot": 1,
            "roster": tuple(map(tuple, roster)),
            "shares": share_slots(quota, roster[0]) if shares is None else shares,
            "digests": tuple(digest_of(str(k)) for k in range(len(roster))),
        }
        | changes
    )


def entry_of(slot: int, path: Sequence[PeerId], attempt: int = 0, loss: float = 1.0) -> Entry:
    """An entry of a STEP_CLOSE."""
    return Entry(slot=slot, attempt=attempt, path=tuple(path), loss=loss)
