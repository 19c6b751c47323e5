"""Real side-cars: they find each other, refuse what is not signed, and leave nothing behind."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import trio

from node.sidecar import channel
from node.sidecar.registry import SidecarRegistry
from node.sidecar.supervisor import Sidecar, SidecarOptions
from protocol.deadlines import Deadlines
from protocol.errors import SidecarError
from protocol.keys import NodeKey
from protocol.manifest import (
    DataSpec,
    Manifest,
    ModelSpec,
    PipelineSpec,
    TrainingSpec,
)
from protocol.manifest import (
    sign as sign_manifest,
)
from protocol.records import NodeRecord, SignedRecord, sign

HERE = Path(__file__).parent
SWARM = "ab" * 32
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
GONE_S = 5.0
HEAL_S = 30.0


class Notes:
    """An observer that keeps what it saw."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.gauges: dict[str, float] = {}

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self.counts[name] += int(amount)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self.gauges[name] = value

    def event(self, name: str, **fields: object) -> None:
        pass


@dataclass
class Member:
    """One node's key, side-car and registry."""

    index: int
    bootstrap: tuple[str, ...] = ()
    listen: tuple[str, ...] = LOOPBACK
    deadlines: Deadlines = field(default_factory=Deadlines)
    swarm: str = SWARM

    def __post_init__(self) -> None:
        self.key = NodeKey(bytes([self.index]) * 32)
        self.notes = Notes()
        options = SidecarOptions(
            self.swarm, listen=self.listen, bootstrap=self.bootstrap, maps_port=False
        )
        self.sidecar = Sidecar(
            self.key, options, self.deadlines, self.notes, random.Random(self.index)
        )
        self.registry = SidecarRegistry(self.sidecar, self.key, self.swarm)

    def record(self, lifetime_s: float = 60.0, **changes: object) -> NodeRecord:
        fields: dict[str, object] = {
            "swarm": self.swarm,
            "peer_id": self.key.peer_id,
            "sidecar_id": self.sidecar.peer_id,
            "stage": self.index,
            "addresses": ("/ip4/127.0.0.1/tcp/4001",),
            "sequence": 1,
            "expires_at": time.time() + lifetime_s,
            "protocol_version": 1,
        }
        return NodeRecord.model_validate(fields | changes)

    def processes(self) -> list[psutil.Process]:
        child = psutil.Process(self.sidecar.pid)
        return [child, *child.children(recursive=True)]

    async def stages(self) -> set[int]:
        return {record.stage for record in await self.registry.nodes()}


async def start(nursery: trio.Nursery, *members: Member) -> None:
    for member in members:
        await nursery.start(member.sidecar.run)
        if member.bootstrap:
            await member.sidecar.wait_joined(60.0)


async def eventually(check: Callable[[], object], within_s: float) -> None:
    """Wait until ``check`` (which may be async) is true and raises nothing of ours."""
    with trio.fail_after(within_s):
        while True:
            try:
                found = check()
                if hasattr(found, "__await__"):
                    found = await found
                if found:
                    return
            except SidecarError:
                pass
            await trio.sleep(0.05)


def are_gone(processes: list[psutil.Process]) -> bool:
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


def folders_of(pid: int) -> list[Path]:
    return list(Path("/tmp").glob(f"shoal-sidecar-{pid}-*"))


async def test_three_find_each_other() -> None:
    """Each knows but its predecessor, and all read all records: others' copies, too."""
    async with trio.open_nursery() as nursery:
        first = Member(1)
        await start(nursery, first)
        second = Member(2, bootstrap=first.sidecar.addresses)
        await start(nursery, second)
        third = Member(3, bootstrap=second.sidecar.addresses)
        await start(nursery, third)
        members = (first, second, third)
        for member in members:
            await member.registry.publish(member.record())
        for member in members:
            await eventually(lambda m=member: has_all(m), GONE_S)
            assert await member.registry.num_witnesses() == 2
            assert member.notes.gauges["sidecar_up"] == 1
        bound = {r.peer_id: r.sidecar_id for r in await first.registry.nodes()}
        assert bound == {m.key.peer_id: m.key.derive("sidecar").peer_id for m in members}
        assert third.sidecar.addresses[0].endswith(third.sidecar.peer_id)
        check_child(first)
        nursery.cancel_scope.cancel()
    assert not folders_of(os.getpid())


async def has_all(member: Member) -> bool:
    return await member.stages() == {1, 2, 3}


def check_child(member: Member) -> None:
    """The child is small: it holds no torch; and its key is no longer on the disk."""
    child = member.processes()[0]
    maps = Path(f"/proc/{child.pid}/maps").read_text()
    assert "libtorch" not in maps
    assert child.memory_info().rss < 150 * 2**20
    [*folders] = folders_of(os.getpid())
    assert folders
    assert not [path for folder in folders for path in folder.glob("key")]


async def test_draining_replaces_and_alone_has_no_witness() -> None:
    async with trio.open_nursery() as nursery:
        alone = Member(1)
        await start(nursery, alone)
        await alone.registry.publish(alone.record())
        await alone.registry.publish(alone.record(lifetime_s=5, is_draining=True))
        [record] = await alone.registry.nodes()
        assert record.is_draining
        assert await alone.registry.num_witnesses() == 0
        nursery.cancel_scope.cancel()


async def test_seed_may_come_later() -> None:
    """A node that was started before its seed joins when that appears."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    seed = Member(1, listen=(f"/ip4/127.0.0.1/tcp/{port}",))
    early = Member(2, bootstrap=(f"/ip4/127.0.0.1/tcp/{port}/p2p/{seed.sidecar.peer_id}",))
    async with trio.open_nursery() as nursery:
        await nursery.start(early.sidecar.run)
        assert early.sidecar.num_neighbours == 0
        await nursery.start(seed.sidecar.run)
        await early.sidecar.wait_joined(60.0)
        nursery.cancel_scope.cancel()


async def test_manifest_reaches_a_joiner() -> None:
    organiser = NodeKey(b"\1" * 32)
    manifest = example_manifest(organiser)
    async with trio.open_nursery() as nursery:
        seed = Member(1, swarm=manifest.swarm_id)
        await start(nursery, seed)
        joiner = Member(2, bootstrap=seed.sidecar.addresses, swarm=manifest.swarm_id)
        await start(nursery, joiner)
        signed = sign_manifest(manifest, organiser)
        await seed.registry.publish_manifest(signed.to_toml())
        assert await joiner.registry.fetch_manifest() == signed
        altered = signed.to_toml().replace('name = "', 'name = "x')
        request = channel.StoreManifest(text=altered, expires_at=time.time() + 599)
        await seed.sidecar.call(request, channel.Stored)
        assert await joiner.registry.fetch_manifest() == signed
        nursery.cancel_scope.cancel()


async def test_others_refuse_what_is_not_signed() -> None:
    """An attacker that checks nothing neither stores at honest nodes nor blinds them."""
    async with trio.open_nursery() as nursery:
        first = Member(1)
        await start(nursery, first)
        second = Member(2, bootstrap=first.sidecar.addresses)
        await start(nursery, second)
        await first.registry.publish(first.record())
        await second.registry.publish(second.record())
        seeds = [*first.sidecar.addresses, *second.sidecar.addresses]
        attacker = await trio.to_thread.run_sync(start_attacker, seeds)
        try:
            line = await trio.to_thread.run_sync(attacker.stdout.readline)
            *refused, taken = json.loads(line)
            assert taken == [True, True], "a valid record must be taken, else this shows nothing"
            assert refused == [[False, False]] * len(refused)
            # The attacker now answers lookups, with all its rubbish and far expiries.
            for member in (first, second):
                await eventually(lambda m=member: sees_honest(m), GONE_S)
        finally:
            attacker.communicate()
        nursery.cancel_scope.cancel()


async def sees_honest(member: Member) -> bool:
    return await member.stages() == {1, 2, 9}


def start_attacker(bootstrap: list[str]) -> subprocess.Popen[str]:
    victim, valid = Member(1), Member(9)
    record, key = victim.record(sequence=2**50, lifetime_s=300), victim.key
    thief = NodeKey(b"\6" * 32)
    nodes, far = f"shoal/{SWARM}/nodes", time.time() + 10**6
    forged = SignedRecord(body=record.body(), signature=thief.sign(record.body())).to_bytes()
    foreign = victim.record(swarm="cd" * 32)
    own = sign(valid.record(), valid.key)
    until = json.loads(SignedRecord.from_bytes(own).body)["expires_at"]
    expired = victim.record(lifetime_s=-1)
    entries = [
        (nodes, victim.key.peer_id, forged, record.expires_at),
        (nodes, victim.key.peer_id, sign(foreign, key), foreign.expires_at),
        (nodes, victim.key.peer_id, sign(expired, key), far),
        (nodes, victim.key.peer_id, own, until),
        (nodes, valid.key.peer_id, own, far),
        (nodes, "anything", b"\x00" * 100, far),
        (nodes, None, b"\x00" * 100, far),
        (f"shoal/{SWARM}/manifest", None, b"\x00" * 100, far),
        ("any other key", None, b"\x00" * 100, far),
        (nodes, valid.key.peer_id, own, until),
    ]
    process = subprocess.Popen(
        [sys.executable, "-P", str(HERE / "sidecar_attacker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    fields = ("key", "subkey", "value", "expires_at")
    listed = [dict(zip(fields, (k, s, v.hex(), e), strict=True)) for k, s, v, e in entries]
    process.stdin.write(json.dumps({"bootstrap": bootstrap, "entries": listed}) + "\n")
    process.stdin.flush()
    return process


async def test_one_lie_does_not_hide_the_truth() -> None:
    """Bad entries are dropped one by one; expiry and size limit are not the liar's to say."""
    command = [sys.executable, "-P", str(HERE / "sidecar_lookup.py")]
    done = await trio.run_process(command, capture_stdout=True)
    truth = {"subkeys": ["a"], "lifetime": 60, "is_limited": False}
    assert json.loads(done.stdout) == [truth, truth, None, None]


IMPATIENT = Deadlines(sidecar_call_s=2.0, sidecar_start_s=60.0)


@pytest.mark.parametrize(
    ("victim", "fault"),
    [
        ("sidecar", signal.SIGKILL),
        ("p2pd", signal.SIGKILL),
        ("sidecar", signal.SIGSTOP),
        ("p2pd", signal.SIGSTOP),
    ],
)
async def test_restart_heals(victim: str, fault: signal.Signals) -> None:
    """Whichever process dies or freezes, both are replaced, at the same address."""
    async with trio.open_nursery() as nursery:
        first = Member(1, deadlines=IMPATIENT)
        await start(nursery, first)
        second = Member(2, bootstrap=first.sidecar.addresses)
        await start(nursery, second)
        await first.registry.publish(first.record())
        # Then it knows whom to call on after a restart, though its own list of seeds is empty.
        await eventually(lambda: first.sidecar.num_neighbours, HEAL_S)
        before, addresses = first.processes(), first.sidecar.addresses
        assert [p.name() for p in before[1:]] == ["p2pd"]
        before[victim == "p2pd"].send_signal(fault)
        limit_s = GONE_S + (IMPATIENT.sidecar_call_s if fault == signal.SIGSTOP else 0)
        await eventually(lambda: are_gone(before), limit_s)
        await eventually(lambda: first.notes.counts["sidecar_restarts"] == 1, HEAL_S)
        await eventually(lambda: first.notes.gauges["sidecar_up"], HEAL_S)
        assert first.sidecar.addresses == addresses
        await eventually(lambda: has_witness(first), HEAL_S)
        assert first.key.peer_id in {r.peer_id for r in await second.registry.nodes()}
        nursery.cancel_scope.cancel()


async def has_witness(member: Member) -> bool:
    return await member.registry.num_witnesses() == 1


async def test_doubt_from_outside_replaces_it() -> None:
    async with trio.open_nursery() as nursery:
        member = Member(1)
        await start(nursery, member)
        before = member.processes()
        member.sidecar.restart("nobody reads our record")
        await eventually(lambda: are_gone(before), GONE_S)
        await eventually(lambda: member.notes.counts["sidecar_restarts"] == 1, HEAL_S)
        await eventually(lambda: member.notes.gauges["sidecar_up"], HEAL_S)
        nursery.cancel_scope.cancel()


async def test_call_during_a_kill_raises() -> None:
    """A call that the side-car never answers ends with it, not with the deadline."""
    async with trio.open_nursery() as nursery:
        member = Member(1, deadlines=Deadlines(sidecar_call_s=30.0))
        await start(nursery, member)
        child = member.processes()[0]
        child.suspend()
        raised: list[SidecarError] = []

        async def call() -> None:
            with pytest.raises(SidecarError, match="ended with status -9") as caught:
                await member.registry.nodes()
            raised.append(caught.value)

        with trio.fail_after(GONE_S):
            async with trio.open_nursery() as calls:
                calls.start_soon(call)
                await trio.sleep(0.2)
                child.kill()
        assert raised
        nursery.cancel_scope.cancel()


async def test_nothing_survives_the_daemon() -> None:
    daemon = subprocess.Popen(
        [sys.executable, "-P", str(HERE / "sidecar_daemon.py")], stdout=subprocess.PIPE, text=True
    )
    with daemon:
        line = await trio.to_thread.run_sync(daemon.stdout.readline)
        processes = [psutil.Process(pid) for pid in json.loads(line)]
        assert len(processes) == 2
        assert folders_of(daemon.pid)
        daemon.kill()
        await eventually(lambda: are_gone(processes), GONE_S)
        assert not folders_of(daemon.pid)


async def test_first_start_tells_why_it_failed() -> None:
    member = Member(1, listen=("/ip4/192.0.2.1/tcp/1",))
    with pytest.RaisesGroup(pytest.RaisesExc(SidecarError, match="listen")):
        async with trio.open_nursery() as nursery:
            await nursery.start(member.sidecar.run)


def example_manifest(organiser: NodeKey) -> Manifest:
    return Manifest(
        name="example",
        organiser=organiser.peer_id,
        model=ModelSpec(
            layers=3, width=32, heads=2, kv_heads=1, feed_forward=64, vocabulary=257, context=32
        ),
        pipeline=PipelineSpec(stages=3),
        training=TrainingSpec(steps=10, quota=4, microbatch=2),
        data=DataSpec(),
    )
