"""Routing on a virtual network: networks, the world of FlowNodes, the optimum, and other policies.

The world is lighter than that of ``protocol.simulation``: it carries nothing but routing messages
between ``FlowNode`` objects, so that it holds thousands of them.
"""
