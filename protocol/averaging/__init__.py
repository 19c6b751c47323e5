"""How the holders of a stage average: the Averager port, ``exact`` and ``agreed`` adapters."""

from protocol.averaging.agreed import AgreedAverager, GroupReducer
from protocol.averaging.exact import ExactAverager, exact_averager
from protocol.averaging.port import Averager, OrderedAverager, Round

__all__ = [
    "AgreedAverager", "Averager", "ExactAverager", "GroupReducer", "OrderedAverager", "Round",
    "exact_averager",
]  # fmt: skip
