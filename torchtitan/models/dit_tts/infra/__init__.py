"""Parallelism, compilation, optimizers and EMA, applied to the plain model from outside."""
