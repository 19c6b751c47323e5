"""The simulated world: virtual network, registry, runner and stages, faults, and the harness.

Everything runs on trio's MockClock with seeded scheduling: the same seed gives the same trace.
Start at ``world.Simulation``; ``cores.node_core`` puts the daemon's node core into it.
"""
