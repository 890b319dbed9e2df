#!/usr/bin/env bash
# Counts of how the package is built (benchmarks/house.py), of revisions and of this checkout, a column each:
#     benchmarks/house.sh [REVISION]…
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for revision in "$@"; do
  mkdir "$folder/$revision"
  git archive "$revision" llmforge passes targets recipes | tar -x -C "$folder/$revision"
done
python=.venv/bin/python
[ -x "$python" ] || python=python3
"$python" -m benchmarks.house --details "${@/#/$folder/}" .
