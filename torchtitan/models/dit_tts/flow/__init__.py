"""Flow matching: the objective with its random draws, guidance and the solver for sampling."""
