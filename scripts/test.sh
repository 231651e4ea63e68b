#!/usr/bin/env bash
# Sets up .venv and runs the tests on two processes, each file on one of them (each page, of the documents).
#   scripts/test.sh [--quick | --slow | --matrix | --documents] [pytest arguments]
#     --quick  while you work: the unit tests that take less than about half a second each
#     --slow   what the others leave out: Inductor's kernels, Ray, the GPU check
#     --matrix layouts of up to eight ranks against each other, with their checkpoints
#     --documents  every command of README and docs, as printed, page by page
# (-n 0 for one process, -n 8 on a larger machine)
set -euo pipefail
cd "$(dirname "$0")/.."
selection=()
spread=loadfile
case "${1:-}" in
--quick)
    shift
    selection=(-m "not slow and not long and not matrix and not documents" --ignore tests/integration_tests)
    ;;
--slow | --matrix)
    selection=(-m "${1#--}")
    shift
    ;;
--documents)
    selection=(-m documents tests/documents)
    spread=load
    shift
    ;;
esac
scripts/setup.sh dev
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the tests are small: more threads only slow them down
# In the order that tests/conftest.py makes: the files that take longest begin first.
exec .venv/bin/python -m pytest -rs -n 2 --dist $spread --no-loadscope-reorder ${selection[@]+"${selection[@]}"} "$@"
