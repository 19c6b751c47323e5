"""The owner's side of the control API: what the CLI calls."""

from __future__ import annotations

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
    Generated,
    GenerateRequest,
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

    def generate(self, prompt: str, num_tokens: int, timeout_s: float = 300.0) -> str:
        """Return the model's continuation of ``prompt``."""
        body = GenerateRequest(prompt=prompt, num_tokens=num_tokens).model_dump_json()
        answer = self._request("POST", "/generate", content=body, timeout_s=timeout_s)
        return self._parse(answer, Generated).text

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
        try:
            return TypeAdapter(kind).validate_json(answer.content)
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
    plain = {cls.code: cls for cls in error_classes() if cls.__init__ is ShoalError.__init__}
    return plain.get(told.code, ShoalError)(told.cause, told.hint)
