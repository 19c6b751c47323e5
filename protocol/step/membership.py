"""Who belongs to the next step: the rule by which the leading authority proposes decisions.

A member that is gone is left out by opening the same step again under the next term; a joiner
whose state matches is let in the same way or at the next step. A stage that nobody could serve
any more is never opened: the swarm waits instead.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial

from protocol.deadlines import Deadlines
from protocol.keys import PeerId
from protocol.manifest import Manifest
from protocol.messages import Decision, Prepared, Presence, Rebuilder, Suspect
from protocol.step.admission_hold import AdmissionHold
from protocol.step.candidate import Candidate
from protocol.step.decision import commonest
from protocol.step.drafts import anew, first_step, next_step, past_step, same_step
from protocol.step.going_back import GoingBack
from protocol.step.moves import next_roster
from protocol.step.newcomers import Newcomers
from protocol.step.pausing import StateWatch, lacking_state
from protocol.step.rebuilding import Rebuilds, can_rebuild
from protocol.step.restarts import Restart, after_restart
from protocol.step.suspicion import Suspicions

# Beyond these nobody unknown is noted: identities cost nothing.
MOST_CANDIDATES = 2048


@dataclass(slots=True)
class Membership:
    """Turns presences, losses and PREPAREDs into the next decision. Times are monotonic.

    Who was not heard of since ``watching_since``, when this authority started, is not gone yet.
    """

    manifest: Manifest
    swarm: str
    deadlines: Deadlines
    ballot: int = 0
    current: Decision | None = None
    candidates: dict[PeerId, Candidate] = field(default_factory=dict)
    prepared: dict[PeerId, Prepared] = field(default_factory=dict)
    suspicions: Suspicions = field(default_factory=Suspicions)
    newcomers: Newcomers = field(default_factory=Newcomers)
    late_since: float | None = None
    joiners_since: float | None = None
    watching_since: float = -math.inf
    history: Callable[[], Iterable[Decision]] = tuple
    hold: AdmissionHold = field(init=False)
    states: StateWatch = field(init=False)
    rebuilds: Rebuilds = field(init=False)
    back: GoingBack = field(init=False)

    def __post_init__(self) -> None:
        limits = self.deadlines
        self.hold = AdmissionHold(limits.admission_hold_s)
        self.states = StateWatch(limits.session_silence_s)
        self.rebuilds = Rebuilds(limits.rebuild_wait_s, limits.request_s, limits.step_stall_s)
        self.back = GoingBack(self.history, limits.state_wait_s)

    # --- what happened ---------------------------------------------------------------------

    def on_presence(self, peer: PeerId, presence: Presence, now: float) -> None:
        """Note that a node is there and what it holds."""
        known = self.candidates.get(peer)
        if known is None:
            if len(self.candidates) < MOST_CANDIDATES:
                self.candidates[peer] = Candidate(presence, now)
        else:
            known.on_presence(presence, now)

    def on_change(self, peer: PeerId, is_up: bool, now: float) -> None:
        """Note that the session with a node came up or went down."""
        if (known := self.candidates.get(peer)) is not None:
            known.on_session(is_up, now)

    def on_prepared(self, peer: PeerId, message: Prepared) -> None:
        """Note that a member's next state is ready."""
        current = self.current
        if current is None or (message.step, message.term) != current.order:
            return
        if current.stage_of(peer) == message.stage:
            self.prepared[peer] = message

    def on_suspect(self, peer: PeerId, message: Suspect, now: float) -> bool:
        """Note that a member cannot work with another; return whether that is news."""
        if self.current is None or (message.step, message.term) != self.current.order:
            return False
        if peer not in self.current.members or message.peer not in self.current.members:
            return False
        return self.suspicions.add(peer, message.peer, now)

    def on_decided(self, decision: Decision) -> None:
        """A decision was chosen; what was counted for the last one is void."""
        if self.current is None or decision.step != self.current.step:
            self.hold.step_opened()
        self.back.on_decided(self.current, decision)
        self.current = decision
        self.joiners_since = self.late_since = None
        self.prepared.clear()
        self.suspicions.clear()
        for peer in decision.members:
            if peer in self.candidates:
                self.hold.let_in(self.candidates[peer])

    def assign(self, peer: PeerId, now: float) -> int:
        """Choose the stage with the fewest nodes for a newcomer that cannot choose itself.

        The lowest among equals; a member that forgot its stage gets the same one again.
        """
        newcomer = self.candidates.get(peer) or Candidate.unknown(now)
        if newcomer.assigned is None and self.current is not None:
            newcomer.assigned = self.current.stage_of(peer)
        if newcomer.assigned is None:
            counts = Counter(c.stage for p, c in self.candidates.items() if self._lives(p, now))
            stages = range(1, self.manifest.pipeline.num_stages + 1)
            newcomer.assigned = min(stages, key=lambda k: (counts[k], k))
        return newcomer.assigned

    def forget_the_gone(self, now: float) -> None:
        """Drop candidates that have been away for long, so that strangers cost no memory."""
        members = set(self.current.members) if self.current else set()
        limit = self.deadlines.record_lifetime_s
        self.candidates = {
            p: c for p, c in self.candidates.items() if p in members or now - c.seen_at < limit
        }

    # --- what to do next -------------------------------------------------------------------

    def propose(self, now: float) -> Decision | None:
        """Return the decision that should come next, or None if there is nothing to decide."""
        if self.current is None:
            return self._first(now)
        stuck = {*self.deserted_stages(now), *self.stateless_stages(now)}
        joining = self._ready_joiners(now)
        rescue = {peer: stage for peer, stage in joining.items() if stage in stuck}
        if rescue:  # whatever else is under way: nobody else has that stage's state
            self.newcomers.let_in(rescue, now)
            return self._reopen(remove=set(), add=rescue)
        past = self._past(stuck, now)
        if past is not None:
            return past
        leaving = self._gone(now) or self._lagging() or self._odd_ones() or self._late(now)
        if leaving:
            self.newcomers.left_out(leaving, now)
            return self._reopen(remove=leaving, add={})
        rebuilt = self._rebuilt(now)
        if rebuilt is not None:
            return rebuilt
        restart = self._restart(now)
        if restart is not None:
            self.newcomers.left_out(restart.replaced, now)
            return self._reopen_after(restart)
        if self.suspicions.is_due(now, self.deadlines.reconnect_grace_s):
            suspected = self._barred({self.suspicions.worst(self.current, now)}, now)
            self.newcomers.left_out(suspected, now)
            return self._reopen(remove=suspected, add={})
        if joining and self._may_admit(now):
            self.newcomers.let_in(joining, now)
            return self._reopen(remove=set(), add=joining)
        if self.current.is_final or not self._all_prepared():
            return None
        if self._is_held(now):
            return None
        self.newcomers.finished(self.current.members)
        return self._next_step(now)

    def deserted_stages(self, now: float) -> tuple[int, ...]:
        """Stages without a living member: nothing can be decided until one of them is back."""
        if self.current is None:
            return ()
        gone = self._gone_members(now)
        return tuple(k for k, holders in enumerate(self.current.roster) if not set(holders) - gone)

    def stateless_stages(self, now: float) -> tuple[int, ...]:
        """Stages whose living members all lack the state: they wait for one that has it."""
        if self.current is None:
            return ()
        lacking = lacking_state(self.current, self.candidates)
        return self.states.stages(self.current, self._gone_members(now), lacking, now)

    def rebuilders(self, now: float) -> tuple[Rebuilder, ...]:
        """Who is to rebuild the deserted stages; nobody unless each of them can be."""
        if self.current is None:
            return ()
        deserted = self.deserted_stages(now)
        lost = {*deserted, *self.stateless_stages(now)}
        due = deserted if can_rebuild(self.manifest, self.current, lost) else ()
        living = {peer for peer in self.candidates if self._lives(peer, now)}
        self.rebuilds.look(self.current, self.candidates, living, due, now)
        return self.rebuilds.named

    # --- rules -----------------------------------------------------------------------------

    def _lives(self, peer: PeerId, now: float) -> bool:
        known = self.candidates.get(peer)
        if known is None:
            return now - self.watching_since < self.deadlines.session_silence_s * 2
        if known.down_since is not None:
            return now - known.down_since < self.deadlines.reconnect_grace_s
        return now - known.seen_at < self.deadlines.session_silence_s * 2

    def _first(self, now: float) -> Decision | None:
        roster: list[tuple[PeerId, ...]] = []
        digests: list[str] = []
        for stage in range(self.manifest.pipeline.num_stages + 1):
            ready = {
                p: c.presence.digest
                for p, c in self.candidates.items()
                if c.presence.stage == stage
                and c.presence.step == 0
                and c.presence.digest is not None
                and self._lives(p, now)
            }
            if not ready:
                return None
            digest = commonest(ready)
            holders = tuple(sorted(p for p, d in ready.items() if d == digest))
            if len(holders) < self._least(stage):
                return None
            roster.append(holders)
            digests.append(digest)
        return first_step(self.swarm, self.ballot, self.manifest.training, roster, digests)

    def _least(self, stage: int) -> int:
        pipeline = self.manifest.pipeline
        return pipeline.min_data_nodes if stage == 0 else pipeline.min_holders

    def _gone_members(self, now: float) -> set[PeerId]:
        assert self.current is not None
        return {p for p in self.current.members if not self._lives(p, now)}

    def _gone(self, now: float) -> set[PeerId]:
        return self._removable(self._gone_members(now))

    def _barred(self, peers: set[PeerId], now: float) -> set[PeerId]:
        """Those of ``peers`` that can be left out, which for a while do not come back.

        If a stage needs them the step is opened again with them: only a new term repeats a failed
        averaging.
        """
        removable = self._removable(peers)
        for known in (self.candidates[peer] for peer in removable if peer in self.candidates):
            known.bar(now, self.deadlines.session_silence_s)
        return removable

    def _late(self, now: float) -> set[PeerId]:
        """Members that never prepare, long after another holder of their stage did."""
        assert self.current is not None
        late: set[PeerId] = set()
        for holders in self.current.roster:
            waiting = {p for p in holders if p not in self.prepared}
            late |= waiting if len(waiting) < len(holders) else set()
        if not late:
            self.late_since = None
        elif self.late_since is None:
            self.late_since = now
        elif now - self.late_since >= self.deadlines.step_stall_s:
            return self._barred(late, now)
        return set()

    def _lagging(self) -> set[PeerId]:
        """Members that know the current decision and do not hold the state it starts from."""
        assert self.current is not None
        lacking = lacking_state(self.current, self.candidates)
        return self._removable(lacking - self.rebuilds.busy)

    def _odd_ones(self) -> set[PeerId]:
        """Members whose prepared digest is not the one that most of their stage agree on."""
        if not self._all_prepared():
            return set()
        assert self.current is not None
        odd: set[PeerId] = set()
        for holders in self.current.roster:
            digests: dict[PeerId, str] = {p: self.prepared[p].digest for p in holders}
            agreed = commonest(digests)
            odd |= {p for p, d in digests.items() if d != agreed}
        return odd

    def _removable(self, peers: set[PeerId]) -> set[PeerId]:
        """Never leave a stage to nobody, or to who lacks its state: rather wait."""
        assert self.current is not None
        useless = peers | lacking_state(self.current, self.candidates, or_unheard=True)
        if any(set(holders) <= useless for holders in self.current.roster):
            return set()
        return peers

    def _ready_joiners(self, now: float) -> dict[PeerId, int]:
        assert self.current is not None
        deserted = self.deserted_stages(now)
        return {
            p: c.presence.stage
            for p, c in self.candidates.items()
            if p not in self.current.members
            and (self.newcomers.may_enter(p, now) or c.presence.stage in deserted)
            and self._lives(p, now)
            and now >= c.barred_until
            and not c.presence.is_draining
            and 0 <= c.presence.stage < len(self.current.roster)
            and c.presence.step == self.current.step
            and c.presence.digest == self.current.digests[c.presence.stage]
            and tuple(c.presence.seen) == self.current.order
        }

    def _may_admit(self, now: float) -> bool:
        """Not while a step ends, unless it is held for them; at the very start several at once.

        A swarm is born with many joiners, and each new term repeats what the last one began.
        """
        assert self.current is not None
        if self.prepared and not self._is_held(now):
            return False
        if self.current.step > 0:
            return True
        if self.joiners_since is None:
            self.joiners_since = now
        return now - self.joiners_since >= self.deadlines.presence_s

    def _is_held(self, now: float) -> bool:
        """Whether a slow joiner is given time: ``admission_hold_s``, and no step more in all."""
        assert self.current is not None
        members = self.current.members
        asking = [
            (known, self._lives(peer, now))
            for peer, known in self.candidates.items()
            if known.presence.wants_hold and peer not in members
        ]
        return self.hold.is_on(asking, now)

    def _all_prepared(self) -> bool:
        assert self.current is not None
        return all(p in self.prepared for p in self.current.members)

    def _reopen(self, remove: set[PeerId], add: dict[PeerId, int]) -> Decision:
        assert self.current is not None
        return same_step(self.current, self.ballot, self.manifest.training, remove, add)

    def _past(self, stuck: Collection[int], now: float) -> Decision | None:
        """An older step once more, if the swarm lost a state for good."""
        assert self.current is not None
        lives = partial(self._lives, now=now)
        found = self.back.look(self.current, stuck, self.candidates, lives, now)
        if found is None:
            return None
        past, roster = found
        training = self.manifest.training
        return anew(past_step(self.current, self.ballot, past, roster), training)

    def _restart(self, now: float) -> Restart | None:
        assert self.current is not None
        living = {p for p in self.current.members if self._lives(p, now)}
        return after_restart(self.current, self.candidates, living)

    def _reopen_after(self, restart: Restart) -> Decision:
        """The same step once more, under a new term; anew if a data node's part is lost."""
        decision = self._reopen(remove=set(restart.replaced), add={})
        return anew(decision, self.manifest.training) if restart.begins_anew else decision

    def _rebuilt(self, now: float) -> Decision | None:
        """The step begins anew with the rebuilt states, once there is one for each lost stage."""
        assert self.current is not None
        ready = self.rebuilds.ready(self.current, self.candidates)
        if not ready or set(self.deserted_stages(now)) != ready.keys():
            return None
        holders = {peer: stage for stage, (peer, _) in ready.items()}
        decision = self._reopen(self._gone_members(now) | holders.keys(), holders)
        if not all(decision.roster):
            return None
        digests = {stage: digest for stage, (_, digest) in ready.items()}
        return anew(decision, self.manifest.training, digests)

    def _next_step(self, now: float) -> Decision:
        assert self.current is not None
        living = {peer for peer in self.candidates if self._lives(peer, now)}
        roster = next_roster(self.current.roster, self.candidates, living)
        prepared = [self.prepared[holders[0]] for holders in roster]
        return next_step(self.current, self.ballot, self.manifest.training, roster, prepared)
