"""Measured networks between regions of the world: latency (ms) above, bandwidth (Mbit/s) below.

The ten regions are those of DT-FM's published configuration, the twelve locations those of
SkipPipe's (converted from GiB/s). SkipPipe gives London and the Netherlands 2 Mbit/s, a thousandth
of their neighbours', which is probably a typing error of theirs; it stays as it was published.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocol.simulation.routing.network import Matrix

BYTES_PER_MBIT = 1e6 / 8

_DTFM = """
     OR   VA   OH   TYO  SEL  SIN  SYD  LON  FRA  IRL
OR   .    67   49   96   124  163  139  136  143  124
VA   790  .    11   143  172  230  197  76   90   67
OH   1100 1120 .    130  159  197  185  86   99   77
TYO  523  524  694  .    34   73   100  210  223  199
SEL  460  500  529  1100 .    74   148  238  235  228
SIN  341  364  452  1010 1140 .    92   169  155  179
SYD  360  383  484  761  580  816  .    262  265  254
LON  420  1160 1050 366  342  500  326  .    14   12
FRA  404  1020 799  360  358  535  328  1140 .    24
IRL  482  1050 1140 465  335  492  344  1090 1080 .
"""

_SKIPPIPE = """
   AU   BE    CA   DE    IA   JP   LA   NL   OR   SG   TW    UK
AU .    129   98   125.5 84   58   69   128  68   48   67    132
BE 84   .     41   4     49   112  70   3    66   83   105   3.5
CA 113  171   .    44    14   74   35   42   30.5 107  89    38.5
DE 90   2083  274  .     53.5 112  73   3.5  68   80   102   6.6
IA 96   243   650  229   .    72.5 23.4 51   19.3 101.5 88   48.1
JP 118  101   155  95    120  .    50   108.5 46.2 35.6 19.2 107
LA 126  167   262  157   528  239  .    71.5 12.4 79.5 64    68
NL 82   2083  215  2083  235  98   122  .    67   81.5 105.5 4.8
OR 126  179   405  128   776  262  1018 175  .    78.5 59.5  64
SG 256  138   103  107   109  335  145  141  144  .    23.2  85
TW 180  107   126  108   110  659  139  103  200  532  .     109.5
UK 81   2083  312  1621  188  76   128  2    182  135  77    .
"""


@dataclass(frozen=True)
class Regions:
    """Places, what lies between any two of them, and between two nodes in the same place."""

    names: tuple[str, ...]
    table: tuple[tuple[float, ...], ...]
    local_latency_ms: float
    local_mbit_s: float

    def matrices(self) -> tuple[Matrix, Matrix]:
        """Return latency (s) and bandwidth (bytes/s) [R, R], the same in both directions."""
        table = np.array(self.table)
        upper, lower = np.triu(table, 1), np.tril(table, -1)
        own = np.eye(len(self.names))
        latency_ms = upper + upper.T + own * self.local_latency_ms
        mbit_s = lower + lower.T + own * self.local_mbit_s
        return latency_ms / 1e3, mbit_s * BYTES_PER_MBIT


def _parse(text: str, local_latency_ms: float, local_mbit_s: float) -> Regions:
    heads, *rows = (line.split() for line in text.strip().splitlines())
    table = tuple(tuple(0.0 if cell == "." else float(cell) for cell in row[1:]) for row in rows)
    return Regions(tuple(heads), table, local_latency_ms, local_mbit_s)


DTFM = _parse(_DTFM, local_latency_ms=5.0, local_mbit_s=2000.0)
SKIPPIPE = _parse(_SKIPPIPE, local_latency_ms=1.0, local_mbit_s=17180.0)
