#!/usr/bin/env bash
# Runs the grid train_configs/ablations/debug.toml, or what is left of it, and writes its analysis.
#   scripts/run_ablations_debug.sh [--dry-run] [--retry oom,failed] ...
exec "$(dirname "$0")/ablate.sh" debug "$@"
