#!/usr/bin/env bash
# Sets up and runs the tests: scripts/test.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh dev
exec .venv/bin/python -m pytest "$@"
