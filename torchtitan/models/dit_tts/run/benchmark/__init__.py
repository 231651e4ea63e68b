"""Benchmark mode: the real trainer on synthetic data, timed step by step."""
