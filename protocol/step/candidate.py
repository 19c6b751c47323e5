"""What an authority knows of one node that takes part or would like to."""

from __future__ import annotations

from dataclasses import dataclass

from protocol.messages import Presence

LONGEST_BAR_S = 3600.0
MOST_BARS = 10


@dataclass(slots=True)
class Candidate:
    """What the authority knows of a node."""

    presence: Presence
    seen_at: float
    down_since: float | None = None
    barred_until: float = 0.0
    num_bars: int = 0
    assigned: int | None = None
    hold_until: float | None = None
    is_heard: bool = True  # since its session came up: it may have been started again

    def on_presence(self, presence: Presence, now: float) -> None:
        """It says what it holds."""
        self.presence, self.seen_at, self.down_since, self.is_heard = presence, now, None, True

    def on_session(self, is_up: bool, now: float) -> None:
        """The session with it came up or went down."""
        if is_up:
            self.is_heard = self.is_heard and self.down_since is None
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now

    def bar(self, now: float, first_s: float) -> None:
        """Keep it out for a while, four times as long each time, an hour at most."""
        self.barred_until = now + min(LONGEST_BAR_S, first_s * 4.0**self.num_bars)
        self.num_bars = min(self.num_bars + 1, MOST_BARS)

    @property
    def stage(self) -> int:
        """The stage it serves or was told to serve, -1 for none."""
        if self.presence.stage >= 0 or self.assigned is None:
            return self.presence.stage
        return self.assigned

    @classmethod
    def unknown(cls, now: float) -> Candidate:
        """A node of which nothing is known."""
        return cls(Presence(step=0, stage=-1, capacity=0, digest=None), now)
