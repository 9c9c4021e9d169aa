#!/usr/bin/env bash
# Make .venv with the development tools, then run every check: ruff, mypy, pytest.
# Arguments go to pytest, for example: scripts/test.sh -k arena -x
# With --all also the tests that CI leaves out because they take too long (some hours).
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"

# Seconds after which pytest starts no further test; single tests are limited in pyproject.toml.
TEST_BUDGET_SECONDS=1320
# With --all there are several times as many, on any machine.
ALL_BUDGET_SECONDS=28800
# Tests of jobs mostly wait for processes of theirs; more workers than this would wait for memory.
MOST_WORKERS=4

failed=()

# check NAME MODULE...: run it in the checkout; a failure is kept for the end, so that all are seen.
check() {
    local name="$1" start=$SECONDS verdict=passed
    shift
    printf '\n== %s: %s\n' "$name" "$*"
    if ! "$VENV/bin/python" -m "$@"; then
        failed+=("$name")
        verdict=FAILED
    fi
    printf '== %s: %s after %d s\n' "$name" "$verdict" $((SECONDS - start))
}

# The distribution's packages come meanwhile.
said="$(mktemp)"
LOG="$said.log" slurm_prepare >"$said" &
slurm=$!
environment_prepare dev
wait "$slurm" || failed+=(slurm)
cat "$said"
rm "$said"
cd "$REPO"
check lint ruff check .
check format ruff format --check .
# Types are checked beside the tests, which leave a core idle now and then.
"$VENV/bin/python" -m mypy >"$VENV/types.log" 2>&1 &
types=$!
# Tests of jobs wait for processes of theirs a fifth of the time: one worker more than cores.
workers=$(($(nproc) + 1))
for argument in "$@"; do
    case "$argument" in --all | --all-layouts)
        TEST_BUDGET_SECONDS="$ALL_BUDGET_SECONDS"
        browser_prepare
        ;;
    esac
done
# Files in the order of tests/conftest.py, not by their number of tests.
side_by_side=(--numprocesses=$((workers < MOST_WORKERS ? workers : MOST_WORKERS)) --dist=loadfile
    --no-loadscope-reorder --session-timeout="$TEST_BUDGET_SECONDS" --durations=15)
check tests pytest "${side_by_side[@]}" "$@"
printf '\n== types: mypy\n'
wait "$types" || failed+=(types)
cat "$VENV/types.log"

[ ${#failed[@]} -eq 0 ] || fail "failed: ${failed[*]} (after $SECONDS s)"
printf '\nall checks passed in %d s\n' "$SECONDS"
