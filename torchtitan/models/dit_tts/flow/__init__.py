"""Flow matching: objective, random numbers, guidance and solvers."""
