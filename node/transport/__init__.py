"""Sessions with other nodes over libp2p (TCP, Noise, Yamux): the daemon's Network port.

``noise``, ``muxer`` and ``host`` make a py-libp2p host that strangers cannot kill, fool or fill.
``greeting``, ``dialling`` and ``reception`` make sessions; ``lane`` and ``session`` run them.
"""

from node.transport.network import Libp2pNetwork
from node.transport.session import Heartbeat, PeerStatus

__all__ = ["Heartbeat", "Libp2pNetwork", "PeerStatus"]
