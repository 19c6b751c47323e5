"""One node, as the daemon and the simulator both run it: its coroutines over the ports."""

from protocol.core.context import NodePorts
from protocol.core.journal import Journal, MemoryJournal, StepReport
from protocol.core.node import NodeCore
from protocol.core.settings import NodeSettings

__all__ = ["Journal", "MemoryJournal", "NodeCore", "NodePorts", "NodeSettings", "StepReport"]
