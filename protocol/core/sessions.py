"""All sessions of a node: those that it keeps for others, and its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from protocol.core.beginning import Beginning
from protocol.core.context import Context
from protocol.core.exporting import Export
from protocol.core.generating import Generation
from protocol.core.kept_sessions import KeptSessions
from protocol.core.session import Post, Session
from protocol.core.settings import NodeSettings
from protocol.errors import NotAllowed, Unreachable
from protocol.messages import (
    Decision,
    Extend,
    Pinned,
    SessionMessage,
    SessionPurpose,
    Stuck,
)
from protocol.ports import Envelope, Observer, PeerChange

PAUSE_S = 0.2
_MOST_NUMBER = 2**53


class Sessions:
    """``context`` and ``decision`` tell what the node serves and obeys now."""

    def __init__(
        self,
        context: Callable[[], Context | None],
        decision: Callable[[], Decision | None],
        settings: NodeSettings,
        observer: Observer,
        post: Post,
        beginning: Beginning,
    ) -> None:
        self._context, self._decision, self._post = context, decision, post
        self._deadlines = settings.deadlines
        self.kept = KeptSessions(
            context, decision, settings.session_bytes, settings.deadlines, observer, beginning
        )
        self.beginning = beginning
        self._own: dict[int, Session] = {}

    async def run(self) -> None:
        """Serve others and keep the own ones alive, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.kept.run)
            while True:
                await trio.sleep(self._deadlines.pin_silence_s / 3)
                for session in self._own.values():
                    session.keep()

    def on_envelope(self, envelope: Envelope) -> None:
        """Hand a message to the session that it belongs to."""
        message = envelope.message
        if isinstance(message, Pinned | Stuck | Extend) and self._is_mine(message):
            session = self._own.get(message.session)
            if session is not None and message.step == session.step:
                session.deliver(envelope)
        else:
            self.kept.take(envelope)

    def _is_mine(self, message: SessionMessage) -> bool:
        ctx = self._context()
        return ctx is not None and message.owner == ctx.me

    def takes_chunk(self, envelope: Envelope) -> bool:
        """Whether a chunk was asked for by a session, or to begin with."""
        return self.beginning.takes(envelope) or any(
            session.takes(envelope) for session in self._own.values()
        )

    def on_change(self, change: PeerChange) -> None:
        """A session of the network came up or went down."""
        if not change.is_up:
            self.kept.lose(change.peer)
            for session in self._own.values():
                session.lose(change.peer)

    # --- own sessions ----------------------------------------------------------------------

    @asynccontextmanager
    async def generation(self, num_tokens: int) -> AsyncIterator[Generation]:
        """Open a text of so many tokens, prompt included (data nodes only).

        Raises Unreachable if there is no holder of some stage that takes it on.
        """
        ctx = self._serving()
        room = min(num_tokens, ctx.manifest.model.context)
        session = await self._open(ctx, "generate", room)
        try:
            yield Generation(session, room)
        finally:
            self._close(session)

    @asynccontextmanager
    async def export(self) -> AsyncIterator[Export]:
        """Open the whole model at one step; NotAllowed unless the manifest lets this node."""
        ctx = self._serving()
        if not ctx.manifest.may_export(ctx.me, is_data_node=ctx.stage == 0):
            raise NotAllowed(
                f"the manifest lets {ctx.manifest.export.replace('_', ' ')} export the model, "
                "not this node",
                "Ask one of them, or the organiser for a swarm whose manifest allows it.",
            )
        session = await self._open(ctx, "export", 0)
        try:
            yield Export(session)
        finally:
            self._close(session)

    def _serving(self) -> Context:
        ctx = self._context()
        if ctx is None or self._decision() is None:
            raise Unreachable("the swarm has not begun yet", "Wait until status names a step.")
        if ctx.stage != 0:
            raise NotAllowed("only a data node has embedding and head", "Ask a data node.")
        return ctx

    async def _open(self, ctx: Context, purpose: SessionPurpose, num_positions: int) -> Session:
        """Try again while the swarm goes from one step to the next."""
        refusals: set[str] = set()
        with trio.move_on_after(self._deadlines.request_s):
            while True:
                decision = self._decision()
                assert decision is not None
                number = ctx.rng.randrange(_MOST_NUMBER)
                session = Session(ctx, decision, number, purpose, num_positions, self._post)
                self._own[number] = session
                is_open = False
                try:
                    is_open = await session.begin()
                finally:
                    if not is_open:
                        self._close(session)
                if is_open:
                    return session
                refusals |= session.refusals
                await trio.sleep(PAUSE_S)
        why = f": {', '.join(sorted(refusals))}" if refusals else ""
        raise Unreachable(
            f"some stage has no holder that keeps its weights for this{why}",
            "Wait until all stages have holders (`shoal peers`), then try again.",
        )

    def _close(self, session: Session) -> None:
        del self._own[session.number]
        session.close()
