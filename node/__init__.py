"""One volunteer's daemon: supervision, control API, transport, side-car, compute, metrics."""
