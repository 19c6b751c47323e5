"""What nodes agree on: manifest, messages, records, the step, routing and averaging.

Nothing here opens a socket, starts a thread or defines a torch module. The rules are pure; the
coroutines in ``core`` reach the world only through the ports of ``ports``, so the daemon and the
simulator run the same objects.
"""
