#!/usr/bin/env bash
# Rates of a restore to a GPU and of its parts, in about a minute.
#
#   benchmarks/device/datapath.sh [--mib 4096] [--markdown FILE]
#
# Needs a Python whose torch sees the GPU: PYTHON, or python3.
set -euo pipefail
NAME=datapath.sh
source "$(dirname "$0")/environment.sh"

need_gpu
need_packages "${OURS[@]}"
find_arenas 8192
timeout --foreground --kill-after=20 120 "$python" -m benchmarks.device.datapath \
    --arenas "$arenas" "$@"
