"""Validation while a run trains: held-out loss at fixed times, speech samples and their scores."""
