"""The states of all stages at one step, piece by piece, for whoever may put the model together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import sha256

from protocol.core.session import Session
from protocol.core.transfer import CHUNK_BYTES, MAX_CHUNKS
from protocol.errors import PeerError, StateMismatch, Unreachable
from protocol.keys import PeerId
from protocol.ports import Tensor

# Takes a piece of a stage's canonical bytes; ``is_first`` when what it had before is void.
Take = Callable[[Tensor, bool], Awaitable[None]]


class Export:
    """Collects the stages of one session; nothing but one piece is in memory here."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def step(self) -> int:
        """The step whose states they are."""
        return self._session.step

    async def collect(self, stage: int, take: Take) -> str:
        """Hand all pieces of a stage's state to ``take``, in order; return its digest.

        Raises Unreachable if no holder can give it, StateMismatch if none gives the right one.
        """
        if stage == self._session.ctx.stage:
            return await self._own(take)
        holders = sorted(self._session.stages[stage].held)
        while holders:
            givers = await self._from_holders(stage, holders, take)
            if givers is None:
                return self._session.decision.digests[stage]
            holders = [peer for peer in holders if peer not in givers]
        raise StateMismatch(
            f"the holders of stage {stage} gave a state with another digest", "Export again."
        )

    async def _own(self, take: Take) -> str:
        session, ctx = self._session, self._session.ctx
        state = session.state
        assert state is not None
        for number in range(state.num_chunks(CHUNK_BYTES)):
            piece = await ctx.compute("state", partial(state.chunk, number, CHUNK_BYTES))
            await take(piece, number == 0)
        return state.digest

    async def _from_holders(
        self, stage: int, holders: list[PeerId], take: Take
    ) -> set[PeerId] | None:
        """Return None if the digest fits, else who gave the pieces."""
        digest, givers = sha256(), set[PeerId]()
        remaining = list(holders)
        number, num_chunks = 0, 1
        while number < num_chunks:
            if not remaining:
                raise Unreachable(
                    f"no holder of stage {stage} is left that keeps the state of step {self.step}",
                    "Export again.",
                )
            peer = remaining[0]
            try:
                answer, piece = await self._session.fetch(peer, stage, number)
            except PeerError as error:
                self._session.ctx.observer.count("errors", code=error.code)
                remaining.pop(0)
                continue
            is_strange = number and answer.num_chunks != num_chunks
            if is_strange or not 0 < answer.num_chunks <= MAX_CHUNKS:
                remaining.pop(0)
                continue
            num_chunks = answer.num_chunks
            givers.add(peer)
            digest.update(piece.contiguous().numpy().data.cast("B"))
            await take(piece, number == 0)
            number += 1
        return None if digest.hexdigest() == self._session.decision.digests[stage] else givers
