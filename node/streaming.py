"""Answers of the control API that come bit by bit, and end when whoever asked has gone."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from protocol.errors import ShoalError

Emit = Callable[[bytes], Awaitable[None]]
Produce = Callable[[Emit], Awaitable[None]]
Explain = Callable[[ShoalError], Response]


class Streamed(Response):
    """Sends what ``produce`` emits, and cancels it when the client hangs up.

    An error before the first bytes is an answer of its own; a later one is for ``produce`` to tell.
    """

    def __init__(self, produce: Produce, explain: Explain, media_type: str) -> None:
        super().__init__(media_type=media_type)
        self._produce, self._explain = produce, explain
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        error: ShoalError | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
            try:
                await self._produce(lambda data: self._emit(send, data))
            except ShoalError as caught:
                error = caught
            nursery.cancel_scope.cancel()
        if error is not None and not self._has_begun:
            await self._explain(error)(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _emit(self, send: Send, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [item for item in self.raw_headers if item[0] != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": True})


def cutting_off(app: ASGIApp) -> ASGIApp:
    """Cut off clients that have stopped reading when we end: hypercorn shields its sends."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        is_done = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cut_off_unless, is_done, send)
            await app(scope, receive, send)
            is_done.set()

    return serve


async def _cut_off_unless(is_done: trio.Event, send: Any) -> None:
    try:
        await is_done.wait()
    finally:
        if not is_done.is_set():
            # hypercorn's stream of HTTP, of the connection's protocol, of its TCP server
            with suppress(OSError):
                connection = send.__self__.send.__self__.send.__self__.stream.socket
                connection.shutdown(socket.SHUT_RDWR)


async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
