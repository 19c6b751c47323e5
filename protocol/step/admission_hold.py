"""How long a step that is done stays open for a joiner that asked for time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from protocol.step.candidate import Candidate

# After a hold that let nobody in there is none for this many limits: strangers may ask too.
REST = 10


@dataclass(slots=True)
class AdmissionHold:
    """At most ``limit_s`` (``admission_hold_s``) per joiner, and per step in all. Monotonic."""

    limit_s: float
    since: float | None = None
    next_at: float = -math.inf

    def is_on(self, asking: Iterable[tuple[Candidate, bool]], now: float) -> bool:
        """Whether the step is held for one of those who ask, given with whether each lives."""
        if self.since is None and now < self.next_at:
            return False
        is_held = False
        for known, lives in asking:
            if known.hold_until is None:
                known.hold_until = now + self.limit_s
            is_held = is_held or (now < known.hold_until and lives)
        if is_held and self.since is None:
            self.since, self.next_at = now, now + REST * self.limit_s
        return is_held and self.since is not None and now - self.since < self.limit_s

    def step_opened(self) -> None:
        """Another step has begun."""
        self.since = None

    def let_in(self, known: Candidate) -> None:
        """Somebody is a member now; if the step was held for it, the hold was not in vain."""
        if known.hold_until is not None:
            known.hold_until, self.next_at = None, -math.inf
