"""Frames over our data plane beside streams of a stock py-libp2p host and of hivemind's P2P.

    python benchmarks/transport.py --write
    python benchmarks/transport.py --full --write     also 64 MiB over slow links; 15 minutes

Two processes, each in a network namespace (needs root; `tc tbf` on a bridge between them limits
the rate), with a proxy of ours that holds every byte for half a round trip where there is one to
be. Without root all is on loopback, and only the rows without a limit are measured. In every run
the three contestants have their turn one after another; ratios are taken within a run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ends import End, EndFailed
from shaped_link import LEFT, QUEUE_MS, RIGHT, ShapedLink, is_possible, shaped_link
from transport_report import KINDS, Cell, Figures, Results

HERE = Path(__file__).parent
RESULTS = HERE / "results"
KIB, MIB = 2**10, 2**20
RTTS_MS = (0, 25, 100)
SIZES: dict[int | None, tuple[int, ...]] = {
    None: (64 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB),
    200: (64 * KIB, MIB, 16 * MIB),
    20: (64 * KIB, MIB, 4 * MIB),
}
CONTROL_PATHS = ((None, 0), (200, 0), (20, 0), (20, 25))
CONTROL_FRAME, CONTROL_S = 256 * KIB, 4.0
UNLIMITED_VOLUME, WARM_UP_VOLUME = 64 * MIB, 4 * MIB


class Bench:
    """Starts ends and proxies on a link, and keeps what they measured."""

    def __init__(self, link: ShapedLink | None, stack: ExitStack) -> None:
        self.link, self._stack = link, stack
        self.results = Results(QUEUE_MS if link else None)
        self._receivers = {kind: self._start(kind, "receive") for kind in KINDS}
        self._senders: dict[str, End] = {}
        self._targets: dict[str, str] = {}

    def _start(self, kind: str, role: str, address: str = "") -> End:
        is_left = role == "send"
        namespace = (self.link.left if is_left else self.link.right) if self.link else None
        host = (LEFT if is_left else RIGHT) if self.link else "127.0.0.1"
        prefix = ["ip", "netns", "exec", namespace] if namespace else []
        end = End(HERE / "transport_ends.py", kind, role, host, address, prefix=prefix)
        self._stack.callback(end.stop)
        return end

    @contextmanager
    def over(self, rtt_ms: int) -> Iterator[None]:
        """Connect all senders over a path of that round trip, and warm it up."""
        with ExitStack() as stack:
            for kind, receiver in self._receivers.items():
                self._targets[kind] = self._behind_proxy(receiver.address, rtt_ms, stack)
                self._senders[kind] = self._start(kind, "send", self._targets[kind])
            for sender in self._senders.values():
                sender.ask(do="bulk", bytes=MIB, count=WARM_UP_VOLUME // MIB)
            yield
            for sender in self._senders.values():
                sender.stop()

    def _behind_proxy(self, address: str, rtt_ms: int, stack: ExitStack) -> str:
        if not rtt_ms:
            return address
        _, _, host, _, port, *rest = address.split("/")
        command = ["ip", "netns", "exec", self.link.right] if self.link else []
        command += [sys.executable, str(HERE / "delay_proxy.py"), host, port, str(rtt_ms)]
        proxy = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        stack.callback(proxy.wait)
        stack.callback(proxy.kill)
        assert proxy.stdout is not None
        return "/".join(["", "ip4", host, "tcp", proxy.stdout.readline().strip(), *rest])

    def measure_bulk(self, rate: int | None, rtt_ms: int, size: int) -> None:
        """One run of one cell: every kind sends the same frames."""
        volume = UNLIMITED_VOLUME if rate is None else rate * 10**6 // 8
        count = max(1, volume // size)
        figures = {kind: self._bulk(kind, size, count) for kind in KINDS}
        self.results.add(Cell(rate, rtt_ms, size), figures)

    def _bulk(self, kind: str, size: int, count: int) -> Figures | None:
        try:
            before = self._receivers[kind].ask(do="nothing")["at"]
            told = self._senders[kind].ask(do="bulk", bytes=size, count=count)
            received_s = self._receivers[kind].ask(do="nothing")["at"] - before
        except EndFailed:
            self._replace(kind)
            return None
        return Figures(size * count, told["s"], told["cpu_s"], received_s)

    def measure_control(self, rate: int | None, rtt_ms: int) -> None:
        """Round trips of small messages of every kind, alone and during bulk."""
        for kind in KINDS:
            for num_bytes in (0, CONTROL_FRAME):
                order = {"do": "control", "bytes": num_bytes, "seconds": CONTROL_S}
                try:
                    told = self._senders[kind].ask(**order)["ms"]
                except EndFailed:
                    self._replace(kind)
                    told = []
                self.results.add_control(rate, rtt_ms, kind, bool(num_bytes), told)

    def _replace(self, kind: str) -> None:
        """A sender whose stream broke is of no more use."""
        self._senders[kind].stop()
        self._senders[kind] = self._start(kind, "send", self._targets[kind])


def measure(bench: Bench, runs: int, sizes: dict[int | None, tuple[int, ...]]) -> None:
    """All paths, all rates, run by run."""
    for rtt_ms in RTTS_MS:
        with bench.over(rtt_ms):
            for rate, of_rate in sizes.items():
                if (rate is None and rtt_ms) or (rate is not None and bench.link is None):
                    continue
                if bench.link is not None:
                    bench.link.limit(rate)
                for size in of_rate:
                    for _ in range(runs):
                        bench.measure_bulk(rate, rtt_ms, size)
                    print(bench.results.latest(), file=sys.stderr)
                if (rate, rtt_ms) in CONTROL_PATHS:
                    bench.measure_control(rate, rtt_ms)
                    print(bench.results.latest_control(), file=sys.stderr)
            if bench.link is not None:
                bench.link.limit(None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--full", action="store_true", help="also the largest frames, slowly")
    parser.add_argument("--quick", action="store_true", help="one size per rate, to try it out")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="record the tables in results/")
    options = parser.parse_args(arguments)
    sizes = SIZES
    if options.full:
        sizes = {rate: tuple(sorted({*some, 64 * MIB})) for rate, some in SIZES.items()}
    if options.quick:
        sizes = dict.fromkeys(SIZES, (MIB,))
    with ExitStack() as stack:
        link = stack.enter_context(shaped_link()) if is_possible() else None
        bench = Bench(link, stack)
        measure(bench, options.runs, sizes)
    page = bench.results.markdown()
    if options.write:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "transport.md").write_text(page)
    print(json.dumps(bench.results.summary()) if options.json else page)


if __name__ == "__main__":
    main()
