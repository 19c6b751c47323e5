"""What this node hears of a step that cannot end, and tells its owner once."""

from __future__ import annotations

import trio

from protocol.errors import StateMismatch, Unreachable
from protocol.messages import Decision, Paused
from protocol.ports import Observer

_DESERTED_HINT = "Start a holder of that stage again, with its state directory or a copy of it."
_STATELESS_HINT = (
    "Stop its holder, put a copy of its state directory that has this state in place, and start it"
    " again; or start another holder that has it. The holder's log says what is wrong there. If all"
    " stages have an older state on disk, the swarm goes back to it by itself."
)


class Pausing:
    """Holds the authorities' last word for ``patience_s``: they repeat it while it is true."""

    def __init__(self, observer: Observer, patience_s: float) -> None:
        self._observer, self._patience_s = observer, patience_s
        self._heard_at = 0.0
        self.word: Paused | None = None

    def hear(self, word: Paused) -> None:
        """An authority says that the step cannot end."""
        is_news = self.word is None or _stages(word) != _stages(self.word)
        self._tell_rebuilders(word)
        self.word, self._heard_at = word, trio.current_time()
        if is_news:
            self._observer.event(
                "swarm_paused",
                code=Unreachable.code if word.deserted else StateMismatch.code,
                cause=f"{'; '.join(_causes(word))}; the swarm waits for one",
                hint=_DESERTED_HINT if word.deserted else _STATELESS_HINT,
            )

    def _tell_rebuilders(self, word: Paused) -> None:
        known = self.word.rebuilders if self.word else ()
        for named in (r for r in word.rebuilders if r not in known):
            self._observer.event("rebuilder_named", stage=named.stage, peer=named.peer)

    def look(self) -> None:
        """Nobody repeats it any more: the swarm goes on, or no authority is there."""
        if self.word is not None and trio.current_time() - self._heard_at > self._patience_s:
            self.end()

    def end(self) -> None:
        """A decision came: the swarm goes on."""
        if self.word is not None:
            self.word = None
            self._observer.event("swarm_resumed")


def tell_if_back(observer: Observer, last: Decision | None, decision: Decision) -> None:
    """A decision may open an older step than the last one: say so."""
    if last is not None and decision.step < last.step:
        observer.count("rollbacks")
        observer.event("went_back", step=decision.step, last_step=last.step)


def _stages(word: Paused) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return word.deserted, word.stateless


def _causes(word: Paused) -> list[str]:
    causes = []
    if word.deserted:
        causes.append(f"no living holder of stage {_listed(word.deserted)}")
    if word.stateless:
        stages = _listed(word.stateless)
        causes.append(f"no holder of stage {stages} has its state at step {word.step}")
    return causes


def _listed(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages))
