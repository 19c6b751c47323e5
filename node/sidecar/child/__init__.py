"""The side-car's own program, ``python -m node.sidecar.child``: the only importer of hivemind.

It is asyncio, because hivemind is. It ends when the pipe from its daemon does, whatever else it
may be doing, and takes its p2pd along.
"""
