"""Grids of benchmark runs, and the search for the largest batch that fits."""
