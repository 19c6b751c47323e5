"""Joining without a leader: which stage a node serves, and when it goes to another (GWTF 1.5).

All of it is pure: nodes read each other's records, and each applies the same rules to what it
sees. ``summaries`` adds records up by stage, ``score`` tells where a newcomer helps most,
``claims`` settles who gives way when several come at once, ``migration`` lets a holder move.
"""

from protocol.joining.claims import Rival, epoch_of, is_live, rank
from protocol.joining.migration import Gap, MigrationRules, best_move, may_move, vacancy
from protocol.joining.score import Newcomer, Score, choose
from protocol.joining.seeking import Seeking, reason_for
from protocol.joining.summaries import Standing, Summaries, flows_of, standings

__all__ = [
    "Gap",
    "MigrationRules",
    "Newcomer",
    "Rival",
    "Score",
    "Seeking",
    "Standing",
    "Summaries",
    "best_move",
    "choose",
    "epoch_of",
    "flows_of",
    "is_live",
    "may_move",
    "rank",
    "reason_for",
    "standings",
    "vacancy",
]
