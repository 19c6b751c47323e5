"""Looks at this computer and at a node's directory for what would keep the node from working.

It changes nothing: every finding names what the owner may do.
"""

from node.doctor.examination import examine
from node.doctor.finding import Finding

__all__ = ["Finding", "examine"]
