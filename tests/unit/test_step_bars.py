"""How long a member that others could not work with is kept out."""

from __future__ import annotations

from protocol.messages import Presence
from protocol.step.candidate import LONGEST_BAR_S, Candidate


def test_each_bar_is_longer_than_the_last_up_to_an_hour() -> None:
    candidate = Candidate(Presence(step=0, stage=1, capacity=1, digest=None), 0.0)
    lengths = []
    for _ in range(30):
        candidate.bar(100.0, 6.0)
        lengths.append(candidate.barred_until - 100.0)
    assert lengths[:3] == [6.0, 24.0, 96.0]
    assert lengths == sorted(lengths)
    assert lengths[-1] == LONGEST_BAR_S
