#!/usr/bin/env bash
# Runs the grid train_configs/ablations/800m.toml, or what is left of it, and writes its analysis.
#   scripts/run_ablations_800m.sh [--dry-run] [--retry oom,failed] ...
exec "$(dirname "$0")/ablate.sh" 800m "$@"
