"""What the daemon shows and lets its owner do: the control API's view of a running node."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import trio

from node.config import LoadedConfig
from node.export_feed import feed_export
from node.flows import flow_status
from node.journal import FileJournal
from node.metrics import Metrics
from node.registration import Registration
from node.status import (
    FlowStatus,
    GenerateRequest,
    NodeState,
    NodeStatus,
    PeerStatus,
    Setting,
    StepStatus,
)
from node.streaming import Emit
from node.totals import Totals
from node.transport.network import Libp2pNetwork
from node.watchdog import Progress
from node.writing import Tell, write
from protocol.core import NodeCore
from protocol.errors import NotAllowed, Unreachable
from protocol.keys import NodeKey
from protocol.manifest import Manifest
from stages.data import Corpus

RECENT_STEPS = 5
ASK_DATA_NODE = "Ask a data node, such as the organiser's."


@dataclass
class RunningNode:
    """The parts of a node that exist once its swarm is known."""

    manifest: Manifest
    network: Libp2pNetwork
    core: NodeCore
    corpus: Corpus | None


class Facade:
    """Implements NodeFacade. Before the swarm is known it answers that the node is starting."""

    def __init__(
        self,
        key: NodeKey,
        swarm: str,
        loaded: LoadedConfig,
        metrics: Metrics,
        journal: FileJournal,
        progress: Progress,
        registration: Registration,
        totals: Totals,
    ) -> None:
        self._key, self._swarm, self._loaded = key, swarm, loaded
        self._metrics, self._journal, self._progress = metrics, journal, progress
        self._registration, self.totals = registration, totals
        self._started_at = time.monotonic()
        self.first_commit_s: float | None = None
        self.running: RunningNode | None = None
        self.leaving = trio.Event()

    def note_commit(self, num_microbatches: int) -> None:
        """Remember how long the first commit took; every commit is progress."""
        self._progress.mark()
        self.totals.note(int(self._metrics.value("step")), num_microbatches)
        if self.first_commit_s is None:
            self.first_commit_s = time.monotonic() - self._started_at

    # --- NodeFacade ------------------------------------------------------------------------

    async def status(self) -> NodeStatus:
        """Who this node is and how it fares."""
        running, metrics = self.running, self._metrics
        core = running.core if running else None
        decision = core.decision if core else None
        state = core.ctx.state if core and core.ctx else None
        recent = list(self._journal.reports)[-RECENT_STEPS:]
        last, validated = self._journal.last_step, self._journal.last_validation
        return NodeStatus(
            peer_id=self._key.peer_id,
            swarm=self._swarm,
            name=running.manifest.name if running else "",
            role=self._loaded.config.role,
            stage=core.ctx.stage if core and core.ctx else None,
            stage_reason=core.placement.reason if core else "",
            state_origin=core.ctx.origin if core and core.ctx else "",
            step=decision.step if decision else 0,
            term=decision.term if decision else 0,
            state=self._state(core),
            committed_last_hour=metrics.committed_last_hour,
            committed_total=self.totals.work.microbatches,
            last_problem=metrics.last_problem,
            loss=last.loss if last else None,
            loss_step=last.step if last else None,
            validation_loss=validated.validation_loss if validated else None,
            validation_step=validated.step if validated else None,
            tokens_per_s=_rate(recent),
            uptime_s=time.monotonic() - self._started_at,
            registered=self._registration.is_registered,
            sidecar_up=bool(metrics.value("sidecar_up")),
            bytes_in=int(metrics.value("bytes", direction="in")),
            bytes_out=int(metrics.value("bytes", direction="out")),
            peers=len(running.network.connected()) if running else 0,
            state_digest=state.digest if state else None,
            state_bytes=int(metrics.value("state_bytes")),
            seconds_to_first_commit=self.first_commit_s,
            progress_age_s=self._progress.age_s,
            flows=self._flows(core),
        )

    def _flows(self, core: NodeCore | None) -> FlowStatus:
        if core is None:
            return FlowStatus()
        return flow_status(core.routing.router.report, trio.current_time())

    async def peers(self) -> Sequence[PeerStatus]:
        """The nodes that this one knows, from their records and its sessions."""
        if self.running is None:
            return []
        core, network = self.running.core, self.running.network
        sessions = {session.peer: session for session in network.peers()}
        answers = []
        for peer in sorted(set(core.discovery.known) | set(sessions)):
            record, session = core.discovery.known.get(peer), sessions.get(peer)
            rtt_s = network.rtt_s(peer)
            heartbeat = session.heartbeat if session else None
            answers.append(
                PeerStatus(
                    peer_id=peer,
                    stage=record.stage if record and record.stage >= 0 else None,
                    address=session.address if session else None,
                    rtt_ms=None if rtt_s is None else round(rtt_s * 1000, 2),
                    bytes_in=session.bytes_in if session else 0,
                    bytes_out=session.bytes_out if session else 0,
                    is_up=session is not None,
                    step=heartbeat.step if heartbeat else None,
                )
            )
        return answers

    async def config(self) -> Sequence[Setting]:
        """The settings in force."""
        return [Setting(name=n, value=v, origin=o) for n, v, o in self._loaded.rows()]

    async def leave(self) -> None:
        """Begin to drain."""
        self.leaving.set()

    async def generate(self, asked: GenerateRequest, tell: Tell) -> None:
        """Continue a prompt token by token through the swarm (data nodes only)."""
        running, corpus = self._data_node()
        await write(running.core, corpus.tokenizer, asked, tell)

    async def export(self, emit: Emit) -> None:
        """Emit the whole model at one step (whom the manifest allows)."""
        running, corpus = self._data_node()
        await feed_export(running.core, running.manifest, corpus.tokenizer, emit)

    def _data_node(self) -> tuple[RunningNode, Corpus]:
        running = self.running
        if self._loaded.config.role == "volunteer":
            raise NotAllowed("only a data node has embedding, head and tokenizer", ASK_DATA_NODE)
        if running is None or running.corpus is None:
            raise Unreachable("the node has not found its swarm yet", "Wait until status shows it.")
        return running, running.corpus

    async def steps(self, after: int) -> Sequence[StepStatus]:
        """The recent steps above ``after``, oldest first (data nodes only)."""
        return [step for step in self._journal.reports if step.step > after]

    def _state(self, core: NodeCore | None) -> NodeState:
        if core is None or core.ctx is None:
            return "starting"
        if core.leaving.is_draining:
            return "draining"
        if core.decision is not None and core.decision.is_final:
            return "done"
        if core.pausing.word is not None:
            return "paused"
        if core.is_syncing:
            return "syncing"
        if not self._metrics.value("sidecar_up"):
            return "degraded"
        if core.member is not None:
            is_led = core.leading is not None or self._hears_an_authority()
            return "training" if is_led else "paused"
        return "waiting" if self.running and self.running.network.connected() else "alone"

    def _hears_an_authority(self) -> bool:
        """Whether somebody is there who opens steps; without, nothing can go on."""
        assert self.running is not None
        sessions = self.running.network.connected()
        return any(peer in sessions for peer in self.running.manifest.authorities)


def _rate(steps: Sequence[StepStatus]) -> float:
    seconds = sum(step.seconds for step in steps)
    return sum(step.tokens for step in steps) / seconds if seconds else 0.0
