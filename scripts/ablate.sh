#!/usr/bin/env bash
# Runs a grid of benchmarks, or what is left of it, and writes its analysis beside the runs.
#   scripts/ablate.sh GRID [--dry-run] [--retry oom,failed] ...     GRID: a TOML file or a name; docs/ablations.md
set -euo pipefail
[[ -e ${1:-} ]] && set -- "$(realpath "$1")" "${@:2}" # relative to the current folder, else a name
cd "$(dirname "$0")/.."
[[ -x .venv/bin/python ]] && python=.venv/bin/python || python=python3

exec "${PYTHON:-$python}" -m titan_tts ablate "$@"
