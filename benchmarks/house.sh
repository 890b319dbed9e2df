#!/usr/bin/env bash
# Counts of how the package is built, of this checkout and of other revisions beside it:
#     benchmarks/house.sh [REVISION]…
# Raw inputs, pairs of domain and operator, literals of ONNX Runtime's domain, and assertions that something is there:
# what the table of operators (llmforge/ir/operators) and types say in their place.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

sources() {  # of a revision, or of the checkout where none is given: all lines of the package
  if [ $# -eq 0 ]; then
    git ls-files -z 'llmforge/*.py' 'passes/*.py' 'targets/*.py' | xargs -0 cat
  else
    git archive "$1" | tar -xO --wildcards 'llmforge/*.py' 'passes/*.py' 'targets/*.py'
  fi
}

count() { grep -oE "$1" | wc -l; }

row() {  # name, lines of source in a file
  printf '%-12s %8d %8d %8d %8d %8d %8d %8d %8d\n' "$1" \
    "$(count '\.inputs\[-?[0-9]+\]' < "$2")" \
    "$(count 'operand\([a-z_.]+, -?[0-9]+\)' < "$2")" \
    "$(count '\((node|[a-z_.]+)\.domain, [a-z_.]+\.op_type\)' < "$2")" \
    "$(count 'op_type (==|!=|in|not in) ' < "$2")" \
    "$(count '"com\.microsoft"' < "$2")" \
    "$(count 'assert .* is not None' < "$2")" \
    "$(wc -l < "$2")" "$3"
}

lines=$(mktemp)
trap 'rm -f "$lines"' EXIT
printf '%-12s %8s %8s %8s %8s %8s %8s %8s %8s\n' revision 'inputs[n]' 'operand n' 'dom,op' 'op_type=' 'microsoft' 'asserts' lines loose
for revision in "$@"; do
  sources "$revision" > "$lines"
  row "${revision:0:12}" "$lines" "$(git ls-tree --name-only "$revision" llmforge/ | grep -cE '\.py$')"
done
sources > "$lines"
row checkout "$lines" "$(find llmforge -maxdepth 1 -name '*.py' | wc -l)"
