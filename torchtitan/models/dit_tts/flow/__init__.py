"""The flow-matching objective, its times and its randomness, and the solvers that sample from it."""
