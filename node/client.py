"""The owner's side of the control API: what the CLI calls."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError

from node.metrics import error_classes
from node.paths import StatePaths
from node.status import (
    ErrorAnswer,
    ExportLine,
    GenerateEvent,
    IdentityStatus,
    NodeStatus,
    PeerStatus,
    Setting,
    StepStatus,
)
from protocol.deadlines import Deadlines
from protocol.errors import ShoalError, Unreachable

T = TypeVar("T")


class ControlClient:
    """Talks to the daemon of a state directory; every method raises Unreachable if none answers.

    What the daemon refuses is raised here as the same error.
    """

    def __init__(self, state_dir: Path, timeout_s: float = Deadlines().control_s) -> None:
        self._state_dir = state_dir
        self._socket = str(StatePaths(state_dir).socket)
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=self._socket),
            base_url="http://shoal",
            timeout=timeout_s,
        )

    def status(self) -> NodeStatus:
        """Who the node is and how it fares."""
        return self._get("/status", NodeStatus)

    def peers(self) -> list[PeerStatus]:
        """The nodes that it knows."""
        return self._get("/peers", list[PeerStatus])

    def config(self) -> list[Setting]:
        """The settings in force and where each came from."""
        return self._get("/config", list[Setting])

    def identity(self) -> IdentityStatus:
        """Who the node is."""
        return self._get("/identity", IdentityStatus)

    def steps(self, after: int = -1) -> list[StepStatus]:
        """The recent steps above ``after``, oldest first; ask again from the last one."""
        return self._get(f"/steps?after={after}", list[StepStatus])

    def leave(self) -> None:
        """Ask the daemon to drain and end; returns before it has."""
        self._request("POST", "/leave")

    def generate(
        self, prompt: str, num_tokens: int, *, temperature: float = 0.0, seed: int = 0
    ) -> Iterator[GenerateEvent]:
        """Yield the model's continuation of ``prompt`` as it comes; closing it cancels the rest."""
        with self._explained():
            self._knock()
            asked = {"prompt": prompt, "num_tokens": num_tokens, "temperature": temperature,
                     "seed": seed}  # fmt: skip
            with self._stream("/generate", asked) as answer:
                for line in answer.iter_lines():
                    event = self._read(line.encode(), GenerateEvent)
                    if event.error is not None:
                        raise _as_error(event.error)
                    yield event

    def export(self) -> Iterator[tuple[ExportLine, bytes]]:
        """Yield the lines of an export, each with the bytes that follow it."""
        with self._explained():
            self._knock()
            with self._stream("/export", None) as answer:
                for head, data in _framed(answer.iter_bytes()):
                    line = self._read(head, ExportLine)
                    if line.error is not None:
                        raise _as_error(line.error)
                    yield line, data

    @contextmanager
    def _stream(self, path: str, body: object) -> Iterator[httpx.Response]:
        """Nothing limits how long a long text takes: it is this computer's own daemon."""
        timeout = httpx.Timeout(None, connect=self._http.timeout.connect)
        with self._http.stream("POST", path, json=body, timeout=timeout) as answer:
            if answer.is_error:
                answer.read()
                raise _error_of(answer)
            yield answer

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _get(self, path: str, kind: type[T]) -> T:
        return self._parse(self._request("GET", path), kind)

    def _request(
        self, method: str, path: str, content: str | None = None, timeout_s: float | None = None
    ) -> httpx.Response:
        timeout = self._http.timeout if timeout_s is None else httpx.Timeout(timeout_s)
        with self._explained():
            self._knock()
            answer = self._http.request(method, path, content=content, timeout=timeout)
        if answer.is_error:
            raise _error_of(answer)
        return answer

    def _knock(self) -> None:
        """Connect and hang up: httpcore leaks its socket when nobody listens."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(self._http.timeout.connect)
            probe.connect(self._socket)

    def _parse(self, answer: httpx.Response, kind: type[T]) -> T:
        return self._read(answer.content, kind)

    def _read(self, content: bytes, kind: type[T]) -> T:
        try:
            return TypeAdapter(kind).validate_json(content)
        except ValidationError as error:
            raise Unreachable(
                "the daemon's answer is not understood",
                "It runs another version of shoal: start it again.",
            ) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TimeoutException, TimeoutError) as error:
            raise Unreachable(
                f"the daemon of {self._state_dir} does not answer",
                "It may be overloaded or frozen; see its log.",
            ) from error
        except (httpx.TransportError, OSError) as error:
            raise Unreachable(
                f"no daemon runs with {self._state_dir}",
                "Start it with `shoal join` or `shoal swarm run`, or name another directory"
                " with --state.",
            ) from error


def _error_of(answer: httpx.Response) -> ShoalError:
    """Rebuild the daemon's error, with the exit status of its class."""
    try:
        told = ErrorAnswer.model_validate_json(answer.content)
    except ValidationError:
        return ShoalError(
            f"the daemon failed with HTTP status {answer.status_code}", "See its log."
        )
    return _as_error(told)


def _as_error(told: ErrorAnswer) -> ShoalError:
    plain = {cls.code: cls for cls in error_classes() if cls.__init__ is ShoalError.__init__}
    return plain.get(told.code, ShoalError)(told.cause, told.hint)


def _framed(parts: Iterator[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Cut a stream into lines of JSON, each with as many bytes as its ``num_bytes`` says."""
    buffer = bytearray()
    for part in parts:
        buffer += part
        while (end := buffer.find(b"\n")) >= 0:
            head = bytes(buffer[:end])
            size = json.loads(head).get("num_bytes", 0)
            if len(buffer) < end + 1 + size:
                break
            yield head, bytes(buffer[end + 1 : end + 1 + size])
            del buffer[: end + 1 + size]
