"""What a dataset holds and what is wrong with it: `titan-tts data inspect` and `titan-tts data doctor`."""
