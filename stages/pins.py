"""A state that somebody still needs after the stage has gone on to the next one.

Nothing is copied while the buffers stay as they are. Before the stage writes into them again, it
tells the pin, which then takes a copy: of the weights, or of the whole state. Whoever holds the
object keeps the memory; the stage itself knows it by a weak reference only.
"""

from __future__ import annotations

import torch

from stages.layout import Layout
from stages.snapshot import SnapshotFormat


class PinnedState:
    """The state of a stage at ``step``; ``leaves`` are its weights as the stage computes with them.

    The worker thread alone may call what it has, for the stage changes the buffers there.
    """

    def __init__(
        self,
        layout: Layout,
        form: SnapshotFormat,
        step: int,
        digest: str,
        data: torch.Tensor,
        *,
        is_whole: bool,
    ) -> None:
        self.step, self.digest, self.is_whole = step, digest, is_whole
        self._layout, self._format, self._data = layout, form, data
        self._is_shared = True
        self.leaves = layout.leaf_views(data[0])

    @property
    def num_bytes(self) -> int:
        """Memory that it takes once the stage has gone on."""
        return (self._data if self.is_whole else self._data[:1]).nbytes

    @property
    def bytes_copied(self) -> int:
        """Memory that it takes now beside the stage's own."""
        return 0 if self._is_shared else self._data.nbytes

    def part(self, data: torch.Tensor) -> None:
        """Copy what is needed, for these buffers are about to be written."""
        if self._is_shared and self._data is data:
            self._data = (data if self.is_whole else data[:1]).clone()
            self._is_shared = False
            self.leaves = self._layout.leaf_views(self._data[0])

    def num_chunks(self, chunk_bytes: int) -> int:
        """Number of chunks of the canonical bytes: the header, then the numbers."""
        return 1 + -(-self._format.num_data_bytes // chunk_bytes)

    def chunk(self, number: int, chunk_bytes: int) -> torch.Tensor:
        """Return a copy of one chunk [bytes] of the canonical bytes of a whole state."""
        if number == 0:
            return torch.frombuffer(bytearray(self._format.head(self.step)), dtype=torch.uint8)
        first = (number - 1) * chunk_bytes
        row = self._data.view(torch.uint8).flatten()
        return row[first : first + chunk_bytes].cpu().clone()
