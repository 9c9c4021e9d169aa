#!/usr/bin/env bash
# Run the tests that touch torch and the frameworks with several releases of torch, each in an
# environment of its own, and write what ran into docs/reference/compatibility.md.
# scripts/cells.sh                 # every release that the page has
# scripts/cells.sh 2.15.0          # one; with a new one the page has one more
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"
PINNED="$(sed -n 's/^torch==//p' "$CONSTRAINTS")"

# cell RELEASE: fails if a test does; what ran is written then too.
cell() {
    local results tests code=0
    [ "$1" = "$PINNED" ] || environment_with_torch "$1"
    environment_prepare dev
    results="$VENV/tested.xml"
    mapfile -t tests < <("$VENV/bin/python" scripts/compatibility_table.py --tests)
    "$VENV/bin/python" -m pytest --junitxml="$results" --numprocesses=$(($(nproc) + 1)) \
        --dist=loadfile --no-loadscope-reorder "${tests[@]}" || code=$?
    # Above 1 pytest did not come to its end.
    [ "$code" -le 1 ] || fail "the tests with torch $1 were not finished"
    "$VENV/bin/python" scripts/compatibility_table.py "$results" &&
        "$VENV/bin/python" scripts/flags_table.py && [ "$code" -eq 0 ]
}

cd "$REPO"
# shellcheck disable=SC2046
[ $# -gt 0 ] || set -- $(sed -n 's/^  "\(.*\)": {$/\1/p' docs/reference/tested_versions.json)
failed=()
for release in "$@"; do
    printf '\n== torch %s\n' "$release"
    (cell "$release") || failed+=("$release")
done
[ ${#failed[@]} -eq 0 ] || fail "tests failed with torch ${failed[*]}"
