"""Compares runs: python optimization_analysis.py RUNS... [--out DIR]

RUNS are folders of runs: of a grid, of one run, or any folder above them.
The result is one HTML page, with its tables and plots as files. The same as `titan-tts analyze`.
"""

import sys

from titan_tts.cli import main

if __name__ == "__main__":
    sys.exit(main(["analyze", *sys.argv[1:]]))
