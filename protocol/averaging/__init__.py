"""How the holders of a stage average: the Averager port and its ``exact`` adapter."""

from protocol.averaging.exact import ExactAverager, exact_averager
from protocol.averaging.port import Averager, OrderedAverager, Round

__all__ = ["Averager", "ExactAverager", "OrderedAverager", "Round", "exact_averager"]
