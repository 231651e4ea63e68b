"""What a run measures while it trains: held-out loss at fixed times, speech samples and their scores."""
