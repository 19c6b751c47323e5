"""The control API: HTTP on a unix socket that only the owner can open, and /metrics."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import hypercorn.trio
import trio
from hypercorn.config import Config
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from node.status import (
    ErrorAnswer,
    GenerateEvent,
    GenerateRequest,
    IdentityStatus,
    NodeStatus,
    PeerStatus,
    Setting,
    StepStatus,
)
from node.streaming import Emit, Streamed, cutting_off
from protocol.errors import ConfigError, IdentityError, ResourceError, ShoalError
from protocol.manifest import explain

MAX_STEPS_PER_ANSWER = 200
_MAX_SOCKET_PATH_BYTES = 107  # sun_path of Linux holds 108 with the final zero
_LOOPBACK = IPv4Address("127.0.0.1")
_GRACE_S = 1.0
_STUCK_CLIENT_MS = 10_000
_GENERATE_HINT = "Send a prompt and num_tokens as JSON."
_LINES, _BYTES = "application/x-ndjson", "application/octet-stream"
_LOGGER = logging.getLogger("shoal.http")

if TYPE_CHECKING:
    from trio_typing import TaskStatus

T = TypeVar("T")


class NodeFacade(Protocol):
    """What the daemon lets its owner see and do."""

    async def status(self) -> NodeStatus:
        """Who this node is and how it fares."""
        ...

    async def peers(self) -> Sequence[PeerStatus]:
        """The nodes that this one knows."""
        ...

    async def config(self) -> Sequence[Setting]:
        """The settings in force."""
        ...

    async def leave(self) -> None:
        """Begin to drain; return at once."""
        ...

    async def generate(
        self, asked: GenerateRequest, tell: Callable[[GenerateEvent], Awaitable[None]]
    ) -> None:
        """Tell the model's continuation of a prompt as it comes; raise ShoalError if it cannot."""
        ...

    async def export(self, emit: Emit) -> None:
        """Emit the whole model (``node.export_feed``); raise ShoalError if it cannot begin."""
        ...

    async def steps(self, after: int) -> Sequence[StepStatus]:
        """The recent steps above ``after``, oldest first."""
        ...


@dataclass(frozen=True, slots=True)
class ControlAddresses:
    """Where both servers listen."""

    socket: Path
    metrics_url: str


async def serve_control(
    facade: NodeFacade,
    exposition: Callable[[], bytes],
    socket_path: Path,
    metrics_port: int = 0,
    metrics_host: IPv4Address = _LOOPBACK,
    *,
    task_status: TaskStatus[ControlAddresses] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serve both until cancelled; raise ResourceError if a socket or the port is not to be had."""
    with (
        _unix_listener(socket_path) as control,
        _tcp_listener(metrics_host, metrics_port) as metrics,
    ):
        url = f"http://{metrics_host}:{metrics.getsockname()[1]}/metrics"
        async with trio.open_nursery() as nursery:
            await nursery.start(_serve, cutting_off(control_app(facade)), control)
            await nursery.start(_serve, metrics_app(exposition), metrics)
            task_status.started(ControlAddresses(socket_path, url))


def control_app(facade: NodeFacade) -> Starlette:
    """The owner's API."""

    async def status(_: Request) -> Response:
        return _answer(NodeStatus, await facade.status())

    async def peers(_: Request) -> Response:
        return _answer(list[PeerStatus], list(await facade.peers()))

    async def config(_: Request) -> Response:
        return _answer(list[Setting], list(await facade.config()))

    async def identity(_: Request) -> Response:
        known = await facade.status()
        fields = {name: getattr(known, name) for name in IdentityStatus.model_fields}
        return _answer(IdentityStatus, IdentityStatus(**fields))

    async def steps(request: Request) -> Response:
        after = _whole_number(request.query_params.get("after", "-1"))
        return _answer(list[StepStatus], list(await facade.steps(after))[:MAX_STEPS_PER_ANSWER])

    async def leave(_: Request) -> Response:
        await facade.leave()
        return Response(status_code=202)

    async def generate(request: Request) -> Response:
        asked = _generate_request(await request.body())
        return Streamed(partial(_tell_text, facade, asked), _error_answer, _LINES)

    async def export(_: Request) -> Response:
        return Streamed(facade.export, _error_answer, _BYTES)

    return Starlette(
        routes=[
            Route("/status", status),
            Route("/peers", peers),
            Route("/config", config),
            Route("/identity", identity),
            Route("/steps", steps),
            Route("/leave", leave, methods=["POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/export", export, methods=["POST"]),
        ],
        exception_handlers={ShoalError: _explain_error},
    )


def metrics_app(exposition: Callable[[], bytes]) -> Starlette:
    """Prometheus' endpoint; it can change nothing."""

    async def metrics(_: Request) -> Response:
        return Response(exposition(), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/metrics", metrics)])


def _answer(kind: type[T], value: T) -> Response:
    return Response(TypeAdapter(kind).dump_json(value), media_type="application/json")


async def _explain_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ShoalError)
    return _error_answer(error)


def _error_answer(error: ShoalError) -> Response:
    status = 400 if isinstance(error, ConfigError) else 409
    return Response(_told(error).model_dump_json(), status, media_type="application/json")


def _told(error: ShoalError) -> ErrorAnswer:
    return ErrorAnswer(code=error.code, cause=error.cause, hint=error.hint)


async def _tell_text(facade: NodeFacade, asked: GenerateRequest, emit: Emit) -> None:
    """One line of JSON for each token; an error after the first of them is the last line."""
    has_begun = False

    async def tell(event: GenerateEvent) -> None:
        nonlocal has_begun
        has_begun = True
        await emit(event.model_dump_json(exclude_defaults=True).encode() + b"\n")

    try:
        await facade.generate(asked, tell)
    except ShoalError as error:
        if not has_begun:
            raise
        await tell(GenerateEvent(error=_told(error)))


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{text!r} is not a step", "Give `after` as a whole number.") from None


def _generate_request(body: bytes) -> GenerateRequest:
    try:
        return GenerateRequest.model_validate_json(body)
    except ValidationError as error:
        raise ConfigError(f"the request is wrong: {explain(error)}", _GENERATE_HINT) from error


async def _serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    task_status: TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
) -> None:
    _LOGGER.setLevel(logging.WARNING)
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]  # hypercorn closes it
    config.errorlog = _LOGGER
    config.graceful_timeout = _GRACE_S
    config.include_server_header = False
    serve: Callable[..., Awaitable[None]] = hypercorn.trio.serve
    await serve(app, config, task_status=task_status)


@contextmanager
def _unix_listener(path: Path) -> Iterator[socket.socket]:
    """Bind a socket of mode 0600, in place of one that a dead daemon left; remove it at the end."""
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"the control socket's path has over {_MAX_SOCKET_PATH_BYTES} bytes: {path}",
            "Choose a state directory with a shorter path (--state).",
        )
    _sweep(path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        umask = os.umask(0o177)
        try:
            listener.bind(str(path))
        except OSError as error:
            raise ResourceError(f"cannot listen on {path}: {error.strerror}") from error
        finally:
            os.umask(umask)
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _sweep(path: Path) -> None:
    """Remove a socket that nobody serves; raise if somebody does, or if it is another file."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ResourceError(f"{path} is in the way: it is not a socket", f"Remove {path}.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        refused = probe.connect_ex(str(path)) in (errno.ECONNREFUSED, errno.ENOENT)
    if not refused:
        raise IdentityError(
            f"another shoal daemon serves {path}",
            "Stop it with `shoal leave`, or give this one another directory with --state.",
        )
    path.unlink(missing_ok=True)


@contextmanager
def _tcp_listener(host: IPv4Address, port: int) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # hypercorn shields its sends: a reader that stops reading must not hold up our end
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _STUCK_CLIENT_MS)
        try:
            listener.bind((str(host), port))
        except OSError as error:
            raise ResourceError(
                f"cannot serve metrics on port {port} of {host}: {error.strerror}",
                "Choose another with --metrics-port, or 0 for a free one; metrics_host (variable "
                "SHOAL_METRICS_HOST) must be an address of this computer.",
            ) from error
        yield listener
