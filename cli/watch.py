"""What a swarm on this computer has said of itself since its start, for whoever shows it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cli.chaos import Chaos
    from cli.live import Snapshot
    from node.local_swarm import LocalSwarm
    from node.status import StepStatus

_STALL_LIMIT_S = 600.0


class Watch:
    """Collects what the swarm says of itself, from its start on."""

    def __init__(self, swarm: LocalSwarm, chaos: Chaos) -> None:
        self._swarm, self.chaos = swarm, chaos
        self._started = time.monotonic()
        self._last_news = self._started
        self.steps: list[StepStatus] = []
        self.first_commit_s: float | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every step of the manifest is done."""
        return len(self.steps) >= self._swarm.manifest.training.steps

    def look(self) -> Snapshot:
        """Ask every node; raise DaemonDiedError, or ResourceError if nothing happens for long."""
        from cli.live import Snapshot
        from protocol.errors import ResourceError

        self._swarm.check()
        now = time.monotonic()
        wanted = [daemon for daemon in self._swarm.daemons if daemon.is_wanted]
        nodes = [(daemon.name, daemon.status()) for daemon in wanted]
        fresh = self._swarm.organiser.steps(self.steps[-1].step if self.steps else -1)
        if fresh:
            self._last_news = now
            self.steps.extend(fresh)
        elif now - self._last_news > _STALL_LIMIT_S:
            raise ResourceError(
                f"no step was finished for {_STALL_LIMIT_S:.0f} s",
                f"The nodes' logs are under {self._swarm.root}.",
            )
        if self.first_commit_s is None and any(s and s.committed_total for _, s in nodes):
            self.first_commit_s = now - self._started
        total = self._swarm.manifest.training.steps
        self.chaos.look(nodes, [step.step for step in fresh], is_over=self.is_complete)
        return Snapshot(
            tuple(self.steps), nodes, total, now - self._started, tuple(self.chaos.losses)
        )
