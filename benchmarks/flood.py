"""What one hostile peer costs a node of a training swarm, flooding it in each way that there is.

    python benchmarks/flood.py --seconds 10 --write

Runs a small swarm (a data node that is also the authority, and a holder). A process of its own
floods the data node in one way after the other. What the victim's processes hold and spend is read
from outside; an honest stranger asks for a round trip twice a second; the swarm goes on training
or does not. All share this computer, so a flood also costs the victim the processor time that the
attacker itself takes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread

import trio
from flood_attacks import ATTACKS, Silent
from node_processes import look_at

from cli.recipe import Recipe
from node.local_swarm import LocalSwarm
from node.transport import Libp2pNetwork
from protocol.errors import PeerError
from protocol.invite import Invite
from protocol.keys import NodeKey, PeerId
from protocol.messages import Applied
from protocol.wire import Limits

HERE = Path(__file__).parent
RESULTS = HERE / "results"
EVERY_S, REST_S, END_S = 0.5, 2.0, 20.0
RECIPE = Recipe(
    name="flood", layers=1, width=32, heads=1, context=32, stages=1, holders=1, quota=4,
    microbatch=2, steps=10**6, learning_rate=1e-3,
)  # fmt: skip


@dataclass
class Row:
    """One attack: what was done, and what it cost."""

    attack: str
    per_s: float = 0.0
    sessions: int = 0
    cut_after_s: float | None = None
    grown_mib: float = 0.0
    kept_mib: float = 0.0
    cpu: float = 0.0
    worst_rtt_ms: float = 0.0
    lost: int = 0
    steps: float = 0.0


class Honest:
    """A stranger that behaves: its round trips in milliseconds, None for each that failed."""

    def __init__(self, address: str, swarm: str) -> None:
        self._address, self._swarm = address, swarm
        self.trips: list[float | None] = []
        self._token: trio.lowlevel.TrioToken | None = None
        self._scope = trio.CancelScope()

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        victim = PeerId(self._address.rpartition("/p2p/")[2])
        network = Libp2pNetwork(
            NodeKey(os.urandom(32)), self._swarm, limits=Limits(1 << 20), observer=Silent()
        )
        with self._scope:
            async with network.running(["/ip4/127.0.0.1/tcp/0"]), trio.open_nursery() as nursery:
                network.introduce(victim, [self._address])
                nursery.start_soon(self._swallow, network)
                while True:
                    await self._trip(network, victim)
                    await trio.sleep(EVERY_S)

    async def _swallow(self, network: Libp2pNetwork) -> None:
        async for _ in network.events:
            pass

    async def _trip(self, network: Libp2pNetwork, victim: PeerId) -> None:
        began = trio.current_time()
        try:
            await network.send(victim, Applied(step=0, stage=1, digest="0" * 64))
        except PeerError:
            self.trips.append(None)
        else:
            self.trips.append(1000 * (trio.current_time() - began))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask in a thread of its own."""
        thread = Thread(target=trio.run, args=(self._main,))
        thread.start()
        try:
            yield
        finally:
            assert self._token is not None
            self._token.run_sync_soon(self._scope.cancel)
            thread.join()


def measure(swarm: LocalSwarm, invite: Invite, attack: str, seconds: float) -> Row:
    """Flood the organiser in one way and look at it meanwhile."""
    row, pid = Row(attack), swarm.organiser.pid
    address = invite.nodes[0]
    honest = Honest(address, invite.swarm_id)
    with honest.running(), _attacker(attack, address, invite, seconds) as child:
        before, last = look_at(pid), _last_step(swarm)
        began, most = time.monotonic(), 0.0
        while child.poll() is None and time.monotonic() - began < seconds + END_S:
            most = max(most, _mib(look_at(pid)))
            time.sleep(0.25)
        passed_s, after = time.monotonic() - began, look_at(pid)
        row.steps = (_last_step(swarm) - last) / passed_s
        child.kill()
        said = child.communicate()[0]
    done = json.loads(said) if said else {}
    row.per_s = done.get("amount", 0) / seconds
    row.sessions, row.cut_after_s = done.get("sessions", 0), done.get("cut_after_s")
    row.grown_mib = most - _mib(before)
    time.sleep(REST_S)
    row.kept_mib = _mib(look_at(pid)) - _mib(before)
    row.cpu = sum(held.cpu_s - before[kind].cpu_s for kind, held in after.items()) / passed_s
    row.lost = sum(trip is None for trip in honest.trips)
    row.worst_rtt_ms = max((trip for trip in honest.trips if trip is not None), default=0.0)
    swarm.check()
    return row


def _last_step(swarm: LocalSwarm) -> int:
    status = swarm.organiser.status()
    return status.step if status else -1


def _mib(held: dict[str, object]) -> float:
    return sum(float(one.rss_mib) for one in held.values())  # type: ignore[attr-defined]


@contextmanager
def _attacker(
    attack: str, address: str, invite: Invite, seconds: float
) -> Iterator[subprocess.Popen[bytes]]:
    swarm, limit = invite.swarm_id, str(seconds)
    command = {
        "nothing": [
            sys.executable,
            "-c",
            f"import time; print('ready', flush=True); time.sleep({seconds})",
        ],
        "records": [sys.executable, str(HERE / "flood_records.py"), invite.seeds[0], swarm, limit],
    }.get(attack, [sys.executable, str(HERE / "flood_attacks.py"), attack, address, swarm, limit])
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        assert child.stdout is not None
        child.stdout.readline()  # it begins
        yield child
    finally:
        child.kill()
        child.wait()


def flood(attacks: list[str], seconds: float) -> list[Row]:
    """All attacks, one after the other, on one swarm."""
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory(prefix="shoal-flood-") as root,
        LocalSwarm(Path(root), RECIPE.manifest, holders=RECIPE.holders) as swarm,
    ):
        swarm.start()
        swarm.wait_until(lambda: len(swarm.organiser.steps()) > 1, "the first steps")
        invite = Invite.decode(swarm.invite, time.time())
        for attack in attacks:
            rows.append(measure(swarm, invite, attack, seconds))
            print(json.dumps(asdict(rows[-1])), file=sys.stderr)
    return rows


def markdown(rows: list[Row], seconds: float) -> str:
    """The table."""
    lines = [
        "# Floods",
        "",
        f"Made by `python benchmarks/flood.py --seconds {seconds:g} --write` on "
        f"{os.cpu_count()} processors.",
        "",
        "| attack | done per s | sessions | first cut after s | memory grown MiB | still held MiB "
        "| victim's CPU s per s | worst round trip ms | round trips lost | steps per s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cut = "" if row.cut_after_s is None else f"{row.cut_after_s:g}"
        lines.append(
            f"| {row.attack} | {row.per_s:.0f} | {row.sessions} | {cut} | {row.grown_mib:.0f} "
            f"| {row.kept_mib:.0f} | {row.cpu:.2f} | {row.worst_rtt_ms:.0f} | {row.lost} "
            f"| {row.steps:.1f} |"
        )
    return "\n".join([*lines, "", *_reading()]) + "\n"


def _reading() -> list[str]:
    return [
        "`nothing` is the swarm by itself. Memory is that of the daemon, its side-car and p2pd",
        "together; what is still held is read two seconds after the attack. `sessions` counts",
        "those that the attacker got; the victim ended the first after so many seconds.",
        "",
        *(f"- `{name}`: {(attack.__doc__ or '').strip()}" for name, attack in ATTACKS.items()),
        "- `records`: Valid records in the DHT, of nodes that do not exist.",
    ]


def main() -> None:
    """Flood and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = ["nothing", *ATTACKS, "records"]
    parser.add_argument("attacks", nargs="*", choices=[*every, []], help="all of them by default")
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--write", action="store_true", help="record the table in results/")
    options = parser.parse_args()
    page = markdown(flood(options.attacks or every, options.seconds), options.seconds)
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "flood.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
