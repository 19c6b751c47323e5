"""How the holders of a stage average: the Averager port and its ``exact`` adapter."""

from protocol.averaging.exact import ExactAverager
from protocol.averaging.port import Averager, Round

__all__ = ["Averager", "ExactAverager", "Round"]
