#!/usr/bin/env bash
# Restarts on a GPU by rung and part, and device memory over ten of them, in under five minutes.
#
#   benchmarks/device/restarts.sh [--markdown FILE] [--only memory|plain]...
#
# Needs a Python whose torch sees the GPU: PYTHON, or python3.
set -euo pipefail
NAME=restarts.sh
source "$(dirname "$0")/environment.sh"

need_gpu
need_packages "${OURS[@]}"
find_arenas 8192
timeout --foreground --kill-after=20 290 "$python" -m benchmarks.device.restarts \
    --arenas "$arenas" "$@"
