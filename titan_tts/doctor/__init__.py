"""Contents and faults of a dataset: `titan-tts data inspect` and `titan-tts data doctor`."""
