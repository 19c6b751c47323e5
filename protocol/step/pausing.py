"""Which stages keep a step from ending: nobody is there, or nobody has the state it starts from."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from protocol.keys import PeerId
from protocol.messages import Decision
from protocol.step.candidate import Candidate


def lacking_state(
    current: Decision, candidates: Mapping[PeerId, Candidate], *, or_unheard: bool = False
) -> set[PeerId]:
    """Members that know the current decision and do not hold the state it starts from.

    With ``or_unheard`` also those that may just have been started again: they said nothing yet, or
    know no decision and do not hold it.
    """
    lacking: set[PeerId] = set()
    told = (current.order, (0, 0)) if or_unheard else (current.order,)
    for stage, holders in enumerate(current.roster):
        wanted = (stage, current.step, current.digests[stage])
        for peer in holders:
            known = candidates.get(peer)
            if or_unheard and known is not None and not known.is_heard:
                lacking.add(peer)
            if known is None or tuple(known.presence.seen) not in told:
                continue
            held = known.presence
            if (held.stage, held.step, held.digest) != wanted:
                lacking.add(peer)
    return lacking


class StateWatch:
    """Finds stages whose living members all lack the state for ``patience_s``.

    For a moment that is so whenever a lone holder reads its state from its disk.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[int, float] = {}

    def stages(
        self, current: Decision, gone: Collection[PeerId], lacking: Collection[PeerId], now: float
    ) -> tuple[int, ...]:
        """Return them in order."""
        living = [set(holders) - set(gone) for holders in current.roster]
        stuck = {k for k, holders in enumerate(living) if holders and holders <= set(lacking)}
        self._since = {stage: self._since.get(stage, now) for stage in sorted(stuck)}
        return tuple(k for k, since in self._since.items() if now - since >= self._patience_s)
