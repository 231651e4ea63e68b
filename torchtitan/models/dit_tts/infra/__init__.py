"""What is applied to the plain model from outside: parallelism, compile, checkpointing, EMA."""
