"""Places of the world, and what a link between two of them is like."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_EARTH_RADIUS_KM = 6371.0
_LIGHT_IN_GLASS_KM_S = 200_000.0
_DETOUR = 1.4  # cables are longer than great circles: London-Sydney is 250 ms and not 170
_ACCESS_S = 0.004  # the last mile on both sides, one way
_MBIT = 125_000.0  # bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node stands: degrees, and its up and down link in bytes per second."""

    name: str
    latitude: float
    longitude: float
    up_bytes_s: float
    down_bytes_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two nodes; ``loss`` is the chance that a message is sent again.

    A lost message is late and not gone, as over TCP. Jitter adds up to ``jitter_s`` per message.
    """

    latency_s: float
    bandwidth_bytes_s: float = math.inf
    jitter_s: float = 0.0
    loss: float = 0.0


LinkProfile = Callable[[Place, Place], Link]

LAB = Place("lab", 0.0, 0.0, 125e6, 125e6)

WORLD: tuple[Place, ...] = (
    Place("virginia", 38.9, -77.4, 500 * _MBIT, 500 * _MBIT),
    Place("california", 37.4, -122.1, 200 * _MBIT, 500 * _MBIT),
    Place("sao-paulo", -23.6, -46.6, 50 * _MBIT, 200 * _MBIT),
    Place("london", 51.5, -0.1, 100 * _MBIT, 500 * _MBIT),
    Place("frankfurt", 50.1, 8.7, 200 * _MBIT, 500 * _MBIT),
    Place("johannesburg", -26.2, 28.0, 40 * _MBIT, 100 * _MBIT),
    Place("mumbai", 19.1, 72.9, 50 * _MBIT, 100 * _MBIT),
    Place("singapore", 1.4, 103.8, 300 * _MBIT, 500 * _MBIT),
    Place("tokyo", 35.7, 139.7, 500 * _MBIT, 500 * _MBIT),
    Place("sydney", -33.9, 151.2, 40 * _MBIT, 100 * _MBIT),
)


def distance_km(a: Place, b: Place) -> float:
    """Return the great-circle distance (haversine)."""
    lat_a, lat_b = math.radians(a.latitude), math.radians(b.latitude)
    d_lat, d_lon = lat_b - lat_a, math.radians(b.longitude - a.longitude)
    chord = math.sin(d_lat / 2) ** 2
    chord += math.cos(lat_a) * math.cos(lat_b) * math.sin(d_lon / 2) ** 2
    return 2 * _EARTH_RADIUS_KM * math.asin(math.sqrt(chord))


def over_the_world(a: Place, b: Place) -> Link:
    """A link of the open internet: latency by distance, a tenth of it as jitter, 0.1 % loss."""
    latency_s = _ACCESS_S + _DETOUR * distance_km(a, b) / _LIGHT_IN_GLASS_KM_S
    return Link(latency_s, jitter_s=latency_s / 10, loss=0.001)


def uniform(link: Link) -> LinkProfile:
    """The same link between any two nodes."""
    return lambda _a, _b: link
