"""`python -m titan_tts`, and `torchrun -m titan_tts train ...`."""

from titan_tts import main

if __name__ == "__main__":
    main()
