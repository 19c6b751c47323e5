"""The rules of a training step, pure: who belongs to it, what counts in it, how it is decided."""
