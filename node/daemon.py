"""One volunteer's daemon: puts the node core on its real ports and owns every task of it.

run_daemon
|- lifeline thread        ends the process when whoever started it is gone
|- Ending.heed_signals    first SIGTERM or SIGINT drains, the second stops at once
|- Sidecar.run            the DHT, in a child process
|- serve_control          the owner's API and /metrics
|- Libp2pNetwork.run      sessions with peers
|- watch, Registration.watch
\\- NodeCore.run           returns when the node has left the swarm
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import trio

from node.assembly import (
    Plan,
    frame_limits,
    make_averager,
    make_stages,
    plan_memory,
    read_corpus,
)
from node.compute import ThreadRunner, use_threads
from node.config import LoadedConfig
from node.control import serve_control
from node.ending import Ending, hold_lifeline
from node.entrance import ClockWatch, Entrance
from node.facade import Facade, RunningNode
from node.faults import faults_from
from node.files import replace_text
from node.identity import load_or_create_key, sole_key, sole_use
from node.initial import FileInitialWeights
from node.invites import publish_invite, withdraw_invite
from node.journal import FileJournal
from node.logs import LOGGER, logging_to
from node.metrics import Metrics
from node.observer import DaemonObserver
from node.paths import StatePaths
from node.ports import RememberedPorts
from node.registration import Registration
from node.sidecar.registry import SidecarRegistry
from node.sidecar.supervisor import Sidecar, SidecarOptions
from node.snapshots import FileSnapshots
from node.totals import Totals
from node.transport.addresses import refuse_taken
from node.transport.network import Libp2pNetwork
from node.transport.probe import Prober
from node.transport.session import Heartbeat
from node.watchdog import Progress, watch
from protocol.averaging import Averager
from protocol.core import NodeCore, NodePorts, NodeSettings
from protocol.errors import ConfigError, ShoalError
from protocol.invite import Invite
from protocol.keys import NodeKey, PeerId
from protocol.manifest import Manifest, SignedManifest
from stages.data import Corpus
from stages.export import save_stage
from stages.state import TorchStageState

Supplies = tuple[Plan, Corpus | None]  # memory and text: what only the owner can give
_LOOPBACK = "127.0.0.1"


@dataclass
class Daemon:
    """The parts that exist from the start, before the swarm's manifest is known."""

    paths: StatePaths
    loaded: LoadedConfig
    key: NodeKey
    environment: Mapping[str, str]
    invite: Invite | None
    signed: SignedManifest | None
    retries: bool = True
    metrics: Metrics = field(default_factory=Metrics)
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        config = self.loaded.config
        self.deadlines = config.deadlines
        self.ports = RememberedPorts(self.paths.ports, config.listen_host, self.metrics.problem)
        self.swarm = self.signed.manifest.swarm_id if self.signed else self._invited.swarm_id
        self.journal = FileJournal(
            self.paths.ballot, self.paths.decisions, self.paths.steps, self.metrics.problem
        )
        self.registration = Registration(self.deadlines, self.metrics, time.time)
        self.facade = Facade(
            self.key, self.swarm, self.loaded, self.metrics, self.journal, self.progress,
            self.registration, Totals(self.paths.totals),
        )  # fmt: skip
        self.ending = Ending(self.facade.leaving, self.deadlines.control_s)
        self.observer = DaemonObserver(self.metrics, self.facade.note_commit)
        self.rng = random.Random(secrets.randbits(64))  # noqa: S311 - jitter, not secrets
        self.sidecar = Sidecar(
            self.key, self._sidecar_options(), self.deadlines, self.observer, self.rng
        )
        self.registry = SidecarRegistry(self.sidecar, self.key, self.swarm)
        self.entrance = Entrance(
            self.key.peer_id, self.invite, self.sidecar, self.registry,
            Prober(self.key, self.swarm, self.deadlines, self.observer), self.deadlines,
            self.observer, retries=self.retries,
        )  # fmt: skip
        self.clock = ClockWatch(self.observer)

    @property
    def _invited(self) -> Invite:
        if self.invite is None:
            raise ConfigError(
                f"{self.paths.root} has neither a manifest nor an invite",
                "Join with `shoal join INVITE`, or create a swarm with `shoal swarm create`.",
            )
        return self.invite

    def _sidecar_options(self) -> SidecarOptions:
        config = self.loaded.config
        host = config.announce_host
        return SidecarOptions(
            swarm=self.swarm,
            listen=(f"/ip4/{config.listen_host}/tcp/{self.ports.choose('dht', config.dht_port)}",),
            announce=(f"/ip4/{host}/tcp/{config.dht_port}",) if host else (),
            bootstrap=self.invite.seeds if self.invite else (),
            maps_port=config.listen_host != _LOOPBACK and host is None,
            peer_cache=self.paths.peers,
        )

    # --- running ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until the node has left the swarm or was told to stop."""
        async with trio.open_nursery() as nursery:
            await nursery.start(
                self.ending.heed_signals, lambda: self.facade.running is not None,
                nursery.cancel_scope,
            )  # fmt: skip
            nursery.start_soon(watch, self.observer, self.progress)
            nursery.start_soon(self._measure)
            self._refuse_taken_ports()
            served = await nursery.start(
                serve_control, self.facade, self.metrics.exposition, self.paths.socket,
                self.loaded.config.metrics_port, self.loaded.config.metrics_host,
            )  # fmt: skip
            self.observer.event("metrics_served", url=served.metrics_url)
            # what the owner must mend is told at once, not when the swarm has been found
            supplies = await self._supply(self.signed.manifest) if self.signed else None
            await nursery.start(self.sidecar.run)
            self.ports.remember("dht", self.sidecar.addresses)
            nursery.start_soon(self.entrance.ask_organiser, self._has_peers)
            manifest = await self._learn_manifest()
            await self._serve_swarm(manifest, supplies or await self._supply(manifest), nursery)
            nursery.cancel_scope.cancel()

    def _refuse_taken_ports(self) -> None:
        """libp2p and p2pd would say it later, and less clearly."""
        config = self.loaded.config
        for port in (config.listen_port, config.dht_port):
            refuse_taken(config.listen_host, port)

    def _has_peers(self) -> bool:
        return self.facade.running is not None and bool(self.facade.running.network.connected())

    async def _learn_manifest(self) -> Manifest:
        """Read the manifest from the state directory, or fetch it until a node has it."""
        self.signed = await self.entrance.find_manifest(self.signed)
        await self.entrance.refuse_twin()
        # half a manifest would keep the node from starting
        replace_text(self.paths.manifest, self.signed.to_toml())
        return self.signed.manifest

    async def _supply(self, manifest: Manifest) -> Supplies:
        config = self.loaded.config
        plan = plan_memory(manifest, config)
        return plan, await trio.to_thread.run_sync(
            read_corpus, manifest, config,
            abandon_on_cancel=True,  # type: ignore[call-arg]  # the stubs are older
        )  # fmt: skip

    async def _serve_swarm(
        self, manifest: Manifest, supplies: Supplies, nursery: trio.Nursery
    ) -> None:
        config, (plan, corpus) = self.loaded.config, supplies
        use_threads(config.threads)
        network = Libp2pNetwork(
            self.key, self.swarm, limits=frame_limits(manifest), observer=self.observer,
            deadlines=self.deadlines, heartbeat=self._heartbeat,
            on_heartbeat=self.registration.on_heartbeat, rng=self.rng,
            announce_host=str(config.announce_host) if config.announce_host else None,
        )  # fmt: skip
        port = self.ports.choose("node", config.listen_port)
        await nursery.start(network.run, [f"/ip4/{config.listen_host}/tcp/{port}"])
        self.ports.remember("node", network.addresses)
        averager = make_averager(
            manifest, config, network, self.observer, self.rng, nursery.start_soon
        )
        core = self._make_core(manifest, network, plan, corpus, averager)
        self.facade.running = RunningNode(manifest, network, core, corpus)
        nursery.start_soon(self.registration.watch, self._has_peers, self.sidecar.restart)
        nursery.start_soon(self._drain_when_told, core, nursery.cancel_scope)
        nursery.start_soon(self._save_when_done, core, manifest)
        if config.role == "organiser":
            await self._open_to_volunteers(network)
        self.observer.event("node_ready", peer=self.key.peer_id, capacity=plan.capacity,
                            stages=sorted(plan.fits), needed_bytes=plan.needed_bytes)  # fmt: skip
        try:
            await core.run()
        finally:
            limit = trio.CancelScope(deadline=trio.current_time() + self.deadlines.control_s)
            limit.shield = True  # also who is stopped at once keeps what was learnt
            with limit:
                await core.save()
                await self._save(core, manifest)
                self.facade.totals.save()

    def _make_core(
        self,
        manifest: Manifest,
        network: Libp2pNetwork,
        plan: Plan,
        corpus: Corpus | None,
        averager: Averager,
    ) -> NodeCore:
        config = self.loaded.config
        ports = NodePorts(
            network=network,
            averager=averager,
            registry=self.registry,
            runner=ThreadRunner(self.observer),
            make_stage=make_stages(manifest, config, plan, corpus),
            journal=self.journal,
            observer=self.observer,
            faults=faults_from(self.environment),
            rng=self.rng,
            snapshots=self._snapshots(),
            initial=FileInitialWeights(self.paths.initial),
        )
        settings = NodeSettings(
            stage=config.stage if config.role == "volunteer" else 0,
            capacity=plan.capacity,
            fits=plan.fits,
            deadlines=self.deadlines,
            addresses=lambda: tuple(network.addresses),
            sidecar_id=self.sidecar.peer_id,
            wall_clock=time.time,
            cpu_clock=time.thread_time,
            snapshot_steps=config.snapshot_steps,
            state_bytes_per_s=config.state_bytes_per_s,
            session_bytes=plan.spare_bytes,
        )
        return NodeCore(self.key, manifest, ports, settings)

    def _snapshots(self) -> FileSnapshots:
        config = self.loaded.config
        return FileSnapshots(
            self.paths.snapshots, config.snapshots_kept, config.snapshot_quota_bytes,
            every=config.snapshot_steps,
        )  # fmt: skip

    def _heartbeat(self, peer: PeerId) -> Heartbeat:
        running = self.facade.running
        core = running.core if running else None
        record = core.discovery.known.get(peer) if core else None
        return Heartbeat(
            step=core.decision.step if core and core.decision else 0,
            last_finished_s_ago=self.progress.age_s,
            record_seen=record.sequence if record else 0,
        )

    async def _open_to_volunteers(self, network: Libp2pNetwork) -> None:
        """Publish the manifest and write the invite: from now on others can join."""
        assert self.signed is not None
        await self.registry.publish_manifest(self.signed.to_toml())
        invite = Invite(
            swarm_id=self.swarm,
            organiser=self.signed.manifest.organiser,
            seeds=self.sidecar.addresses,
            nodes=tuple(network.addresses),
        )
        publish_invite(self.paths, self.loaded.config, invite)

    async def _measure(self) -> None:
        """Keep the gauges that no single event sets."""
        while True:
            self.facade.totals.save()
            running = self.facade.running
            if running is not None:
                self.observer.gauge("peers", len(running.network.connected()))
                self.clock.look([session.clock_offset_s for session in running.network.peers()])
                self.observer.gauge("paused", float(running.core.pausing.word is not None))
                state = running.core.ctx.state if running.core.ctx else None
                if isinstance(state, TorchStageState):
                    self.observer.gauge("state_bytes", state.state_bytes)
                    self.observer.gauge("gradient_norm", state.gradient_norm)
                    self.observer.gauge("update_norm", state.update_norm)
            await trio.sleep(self.deadlines.heartbeat_s)

    # --- ending ----------------------------------------------------------------------------

    async def _drain_when_told(self, core: NodeCore, scope: trio.CancelScope) -> None:
        await self.facade.leaving.wait()
        core.drain()
        await trio.sleep(self.deadlines.drain_s)
        self.ending.time_out(scope, self.observer, self.deadlines.drain_s)

    async def _save_when_done(self, core: NodeCore, manifest: Manifest) -> None:
        await core.wait_until_done()
        await self._save(core, manifest)

    async def _save(self, core: NodeCore, manifest: Manifest) -> None:
        """Write this stage's weights, if it has learnt anything."""
        ctx = core.ctx
        if ctx is None or ctx.state.step == 0:
            return
        state = ctx.state
        assert isinstance(state, TorchStageState)
        try:
            await ctx.runner.run(
                "state", lambda: save_stage(state, manifest.model, self.paths.weights)
            )
        except OSError as error:
            self.observer.event("weights_not_saved", code="resource", cause=str(error))
            return
        self.observer.event("weights_saved", step=state.step, stage=ctx.stage)


def run_daemon(
    paths: StatePaths,
    loaded: LoadedConfig,
    environment: Mapping[str, str],
    lifeline_fd: int | None,
    *,
    retries: bool = True,
) -> int:
    """Run one daemon until it has left its swarm; return its exit status (``node.ending``).

    Raises ShoalError for what the owner can mend.
    """
    paths.create()
    if lifeline_fd is not None:
        threading.Thread(target=hold_lifeline, args=(lifeline_fd,), daemon=True).start()
    config = loaded.config
    with sole_use(paths), logging_to(paths.log, config.log_level):
        key = load_or_create_key(paths)
        withdraw_invite(paths, config)  # one that a killed daemon left
        invite = Invite.decode(config.invite, time.time()) if config.invite else None
        signed = _known_manifest(paths, invite)
        daemon = Daemon(paths, loaded, key, environment, invite, signed, retries)
        try:
            with sole_key(key.peer_id):
                trio.run(daemon.run)
                return daemon.ending.status
        except BaseExceptionGroup as group:
            cause = _first_cause(group)
            if not isinstance(cause, ShoalError):
                LOGGER.error("daemon_failed", exc_info=group)
            raise cause from group
        finally:
            withdraw_invite(paths, config)


def _known_manifest(paths: StatePaths, invite: Invite | None) -> SignedManifest | None:
    if not paths.manifest.exists():
        return None
    signed = SignedManifest.from_toml(paths.manifest.read_text(errors="replace"))
    signed.verify(invite.swarm_id if invite else None)
    return signed


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """A bug comes before a ShoalError, which comes before an interruption."""
    leaves: list[BaseException] = []
    stack: list[BaseException] = [group]
    while stack:
        error = stack.pop()
        if isinstance(error, BaseExceptionGroup):
            stack.extend(error.exceptions)
        else:
            leaves.append(error)
    logging.getLogger("shoal").debug("ended by %d errors", len(leaves))
    bugs = [e for e in leaves if isinstance(e, Exception) and not isinstance(e, ShoalError)]
    known = [e for e in leaves if isinstance(e, ShoalError)]
    return (bugs or known or leaves)[0]
