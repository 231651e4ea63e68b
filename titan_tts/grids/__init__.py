"""Grids of benchmark runs, and their analysis."""
