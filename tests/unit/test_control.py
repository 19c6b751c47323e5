"""The control API over its unix socket, driven by the client that the CLI uses."""

from __future__ import annotations

import socket
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
import trio

from node.client import ControlClient
from node.control import MAX_STEPS_PER_ANSWER, ControlAddresses, serve_control
from node.metrics import Metrics
from node.paths import StatePaths
from node.status import (
    ExportLine,
    GenerateEvent,
    GenerateRequest,
    NodeStatus,
    PeerStatus,
    Problem,
    Setting,
    StepStatus,
)
from node.streaming import Emit
from node.writing import Tell
from protocol.errors import ConfigError, IdentityError, ResourceError, StateMismatch, Unreachable

T = TypeVar("T")
STATUS = NodeStatus(
    peer_id="12D3", swarm="ab" * 32, name="demo", role="volunteer", stage=2, step=7,
    state="training", loss=float("nan"), last_problem=Problem(code="peer", text="gone", at=1.5),
)  # fmt: skip


class FakeNode:
    """A daemon that answers from memory."""

    def __init__(self) -> None:
        self.has_left = False
        self.pause_s = 0.0
        self.was_cancelled = trio.Event()

    async def status(self) -> NodeStatus:
        return STATUS

    async def peers(self) -> list[PeerStatus]:
        return [PeerStatus(peer_id="12D4", stage=0, rtt_ms=1.25, is_up=True)]

    async def config(self) -> list[Setting]:
        return [Setting(name="threads", value=2, origin="--threads")]

    async def leave(self) -> None:
        self.has_left = True

    async def generate(self, asked: GenerateRequest, tell: Tell) -> None:
        if asked.prompt == "broken":
            raise StateMismatch("no model yet", "Wait.")
        try:
            await tell(GenerateEvent(step=7))
            for _ in range(asked.num_tokens):
                await tell(GenerateEvent(text=asked.prompt.upper()))
                await trio.sleep(self.pause_s)
            if asked.prompt == "fragile":
                raise StateMismatch("lost it", "Again.")
        except trio.Cancelled:
            self.was_cancelled.set()
            raise

    async def export(self, emit: Emit) -> None:
        for number in range(3):
            head = ExportLine(kind="piece", stage=number, num_bytes=300_000)
            await emit(head.model_dump_json().encode() + b"\n" + bytes([10 + number]) * 300_000)

    async def steps(self, after: int) -> list[StepStatus]:
        return [StepStatus(step=step, loss=1.0, tokens=8) for step in range(after + 1, 1000)]


@asynccontextmanager
async def served(
    state: Path, node: FakeNode | None = None, metrics: Metrics | None = None
) -> AsyncIterator[ControlAddresses]:
    async with trio.open_nursery() as nursery:
        exposition = (metrics or Metrics()).exposition
        addresses: ControlAddresses = await nursery.start(
            serve_control, node or FakeNode(), exposition, StatePaths(state).socket
        )
        yield addresses
        nursery.cancel_scope.cancel()


async def ask(state: Path, question: Callable[[ControlClient], T]) -> T:
    def call() -> T:
        with ControlClient(state) as client:
            return question(client)

    return await trio.to_thread.run_sync(call)


def text_of(client: ControlClient, prompt: str, num_tokens: int) -> str:
    return "".join(event.text for event in client.generate(prompt, num_tokens))


async def fetch(url: str, method: str = "GET") -> httpx.Response:
    return await trio.to_thread.run_sync(lambda: httpx.request(method, url, timeout=5))


async def test_answers_arrive_as_they_were_given(tmp_path: Path) -> None:
    async with served(tmp_path):
        status = await ask(tmp_path, ControlClient.status)
        assert status.model_dump(exclude={"loss"}) == STATUS.model_dump(exclude={"loss"})
        assert status.loss is not None
        assert status.loss != status.loss
        assert (await ask(tmp_path, ControlClient.peers))[0].rtt_ms == 1.25
        assert (await ask(tmp_path, ControlClient.config))[0].origin == "--threads"
        assert (await ask(tmp_path, ControlClient.identity)).peer_id == "12D3"
        assert await ask(tmp_path, lambda client: text_of(client, "ab", 2)) == "ABAB"


async def test_bytes_arrive_with_their_lines(tmp_path: Path) -> None:
    async with served(tmp_path):
        pieces = await ask(tmp_path, lambda client: list(client.export()))
    assert [(line.stage, set(data), len(data)) for line, data in pieces] == [
        (number, {10 + number}, 300_000) for number in range(3)
    ]


async def test_a_client_that_hangs_up_cancels_what_it_asked_for(tmp_path: Path) -> None:
    node = FakeNode()
    node.pause_s = 0.01

    def listen(client: ControlClient) -> str:
        events = client.generate("x", 4096)
        first = [next(events).text for _ in range(3)]
        events.close()
        return "".join(first)

    async with served(tmp_path, node):
        assert await ask(tmp_path, listen) == "XX"
        with trio.fail_after(5):
            await node.was_cancelled.wait()
        assert (await ask(tmp_path, ControlClient.status)).step == 7


async def test_the_end_does_not_wait_for_a_client_that_stopped_reading(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with served(tmp_path) as addresses:
            stream = await trio.open_unix_socket(str(addresses.socket))
            await stream.send_all(b"POST /export HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
            await trio.sleep(0.3)  # more than the socket's buffers hold is on its way
        await stream.aclose()


async def test_an_error_in_the_middle_comes_after_what_was_said(tmp_path: Path) -> None:
    async with served(tmp_path):
        heard: list[str] = []

        def listen(client: ControlClient) -> None:
            for event in client.generate("fragile", 2):
                heard.append(event.text)

        with pytest.raises(StateMismatch, match="lost it"):
            await ask(tmp_path, listen)
        assert heard == ["", "FRAGILE", "FRAGILE"]


async def test_steps_come_in_pages(tmp_path: Path) -> None:
    async with served(tmp_path):
        first = await ask(tmp_path, ControlClient.steps)
        assert [step.step for step in first] == list(range(MAX_STEPS_PER_ANSWER))
        rest = await ask(tmp_path, lambda client: client.steps(after=997))
        assert [step.step for step in rest] == [998, 999]


async def test_leave_reaches_the_node(tmp_path: Path) -> None:
    node = FakeNode()
    async with served(tmp_path, node):
        await ask(tmp_path, ControlClient.leave)
    assert node.has_left


async def test_errors_keep_class_cause_and_hint(tmp_path: Path) -> None:
    async with served(tmp_path):
        with pytest.raises(StateMismatch) as caught:
            await ask(tmp_path, lambda client: text_of(client, "broken", 1))
        assert (caught.value.cause, caught.value.hint) == ("no model yet", "Wait.")
        with pytest.raises(ConfigError, match="num_tokens"):
            await ask(tmp_path, lambda client: text_of(client, "x", 0))


async def test_only_the_owner_may_open_the_socket(tmp_path: Path) -> None:
    async with served(tmp_path) as addresses:
        assert stat.S_IMODE(addresses.socket.stat().st_mode) == 0o600
    assert not addresses.socket.exists()


async def test_metrics_are_on_loopback_and_read_only(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.gauge("step", 41)
    async with served(tmp_path, metrics=metrics) as addresses:
        assert addresses.metrics_url.startswith("http://127.0.0.1:")
        answer = await fetch(addresses.metrics_url)
        assert "shoal_step 41.0" in answer.text
        assert answer.headers["content-type"].startswith("text/plain")
        assert (await fetch(addresses.metrics_url, "POST")).status_code == 405
        assert (await fetch(addresses.metrics_url.replace("metrics", "status"))).status_code == 404


async def test_metrics_are_served_where_the_owner_says(tmp_path: Path) -> None:
    """A container's Prometheus lives on another address; the control API stays where it is."""
    async with trio.open_nursery() as nursery:
        addresses: ControlAddresses = await nursery.start(
            partial(serve_control, metrics_host=IPv4Address("127.0.0.2")),
            FakeNode(), Metrics().exposition, StatePaths(tmp_path).socket,
        )  # fmt: skip
        assert addresses.metrics_url.startswith("http://127.0.0.2:")
        assert "shoal_step" in (await fetch(addresses.metrics_url)).text
        with pytest.raises(httpx.ConnectError):
            await fetch(addresses.metrics_url.replace("127.0.0.2", "127.0.0.1"))
        nursery.cancel_scope.cancel()


async def test_a_host_that_is_not_ours_is_named(tmp_path: Path) -> None:
    foreign = IPv4Address("192.0.2.1")
    with pytest.raises(ResourceError, match=r"of 192\.0\.2\.1") as caught:
        await serve_control(FakeNode(), bytes, StatePaths(tmp_path).socket, metrics_host=foreign)
    assert "SHOAL_METRICS_HOST" in caught.value.hint


async def test_cancellation_does_not_wait_for_an_idle_client(tmp_path: Path) -> None:
    with trio.fail_after(5):
        async with served(tmp_path) as addresses:
            stream = await trio.open_unix_socket(str(addresses.socket))
            await stream.send_all(b"GET /status HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await stream.receive_some()
        await stream.aclose()


async def test_a_dead_daemons_socket_is_swept(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(StatePaths(tmp_path).socket))
    async with served(tmp_path):
        assert (await ask(tmp_path, ControlClient.status)).step == 7


async def test_a_living_daemons_socket_is_respected(tmp_path: Path) -> None:
    async with served(tmp_path):
        with pytest.raises(IdentityError, match="another shoal daemon"):
            await serve_control(FakeNode(), bytes, StatePaths(tmp_path).socket)
        assert (await ask(tmp_path, ControlClient.status)).step == 7


async def test_another_file_in_the_way_is_kept(tmp_path: Path) -> None:
    StatePaths(tmp_path).socket.write_text("mine")
    with pytest.raises(ResourceError, match="in the way"):
        await serve_control(FakeNode(), bytes, StatePaths(tmp_path).socket)
    assert StatePaths(tmp_path).socket.read_text() == "mine"


async def test_a_taken_metrics_port_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port}"):
            await serve_control(FakeNode(), bytes, StatePaths(tmp_path).socket, port)
    assert not StatePaths(tmp_path).socket.exists()


async def test_a_path_too_long_for_a_socket_is_refused_clearly(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    with pytest.raises(ConfigError, match="107 bytes"):
        await serve_control(FakeNode(), bytes, StatePaths(deep).socket)


def test_without_a_daemon_the_client_says_what_to_start(tmp_path: Path) -> None:
    with ControlClient(tmp_path) as client, pytest.raises(Unreachable) as caught:
        client.status()
    assert str(tmp_path) in caught.value.cause
    assert "shoal join" in caught.value.hint


def test_a_frozen_daemon_is_told_from_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(StatePaths(tmp_path).socket))
        frozen.listen()
        client = ControlClient(tmp_path, timeout_s=0.1)
        with client, pytest.raises(Unreachable, match="does not answer"):
            client.status()
