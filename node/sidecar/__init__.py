"""The DHT side-car: discovery through hivemind, in a process of its own.

``child`` is that process: it alone imports hivemind (which cannot share a process with libp2p).
``Sidecar`` (supervisor) starts it by exec, watches and restarts it; ``SidecarRegistry`` (registry)
is the daemon's Registry port on top; ``channel`` is what the two say to each other over pipes.
Nothing is imported here, because the child passes through and must stay small.
"""
