"""Benchmark mode: the real trainer on synthetic data, timed, with every figure's convention beside it."""
