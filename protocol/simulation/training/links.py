"""Transfers of activations and gradients: one at a time on a node's up-link and on its down-link.

A transfer takes size / bandwidth of the pair, during which it has the sender's up-link for itself;
its first byte arrives a latency later, and then it has the receiver's down-link for as long. Bytes
that wait at the receiver's end hold nobody else up. Small messages pass beside the bulk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protocol.simulation.training.agenda import Agenda
from protocol.simulation.training.fleet import Fleet


@dataclass(slots=True, eq=False)
class Transfer:
    """One tensor under way. Its sender must live until ``sent_s``, its receiver to the end."""

    source: int
    target: int
    sent_s: float
    is_delivered: bool = False
    is_cut: bool = False


class Links:
    """All up-links and down-links."""

    def __init__(self, agenda: Agenda, fleet: Fleet, is_alive: Callable[[int], bool]) -> None:
        self._agenda, self._fleet, self._is_alive = agenda, fleet, is_alive
        self._open: dict[int, set[Transfer]] = {}
        self._up_free_s: dict[int, float] = {}
        self._down_free_s: dict[int, float] = {}
        self.num_transfers = 0

    def send(self, source: int, target: int, arrived: Callable[[], None]) -> Transfer:
        """Send one activation or gradient; ``arrived`` is called unless an end dies on the way."""
        self.num_transfers += 1
        duration_s = self._fleet.transfer_s(source, target)
        start_s = max(self._agenda.now, self._up_free_s.get(source, 0.0))
        self._up_free_s[source] = start_s + duration_s
        transfer = Transfer(source, target, start_s + duration_s)
        transfer.is_cut = not self._is_alive(source)
        self._open.setdefault(source, set()).add(transfer)
        first_byte_s = start_s + self._fleet.latency_s(source, target)
        self._agenda.at(first_byte_s, lambda: self._receive(transfer, duration_s, arrived))
        return transfer

    def crash(self, node: int) -> None:
        """Cut off what a node has not wholly sent."""
        for transfer in self._open.pop(node, ()):
            transfer.is_cut = transfer.is_cut or transfer.sent_s > self._agenda.now

    def _receive(self, transfer: Transfer, duration_s: float, arrived: Callable[[], None]) -> None:
        if transfer.is_cut or not self._is_alive(transfer.target):
            return
        start_s = max(self._agenda.now, self._down_free_s.get(transfer.target, 0.0))
        self._down_free_s[transfer.target] = start_s + duration_s
        self._agenda.at(start_s + duration_s, lambda: self._deliver(transfer, arrived))

    def _deliver(self, transfer: Transfer, arrived: Callable[[], None]) -> None:
        self._open.get(transfer.source, set()).discard(transfer)
        if not transfer.is_cut and self._is_alive(transfer.target):
            transfer.is_delivered = True
            arrived()
