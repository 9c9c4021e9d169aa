#!/usr/bin/env bash
# Training on a GPU that is killed and resumes, bit by bit, in under four minutes.
#
#   benchmarks/device/survives.sh [--markdown FILE] [--only CASE]...
#
# Needs a Python whose torch sees the GPU, and megatron-core: PYTHON, or python3.  See
# environment.sh for packages that are missing.
set -euo pipefail
NAME=survives.sh
source "$(dirname "$0")/environment.sh"

need_gpu
need_packages "${OURS[@]}" megatron.core:megatron-core
# Seven states of under 1 GiB, with two slots of data and parity each.
find_arenas 32768
timeout --foreground --kill-after=20 230 "$python" -m benchmarks.device.survives \
    --arenas "$arenas" "$@"
