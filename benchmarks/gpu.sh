#!/usr/bin/env bash
# Figures of a machine with a GPU, in under nine minutes: saving in one table, restarts in another.
#
#   benchmarks/gpu.sh [--markdown FILE] [--json FILE] [--mib 2048]
#
# Needs nothing but a Python whose torch sees the GPU: PYTHON, or python3.  Our few packages are
# installed into a temporary folder; MEGATRON_FT_WHEELS names a folder of wheels for machines
# without a network.  Only ratios within one run are compared.  When the time is up, or a part
# fails, the table has what there is.
set -euo pipefail
NAME=gpu.sh
source "$(dirname "$0")/device/environment.sh"

MIB=2048
need_gpu
need_packages "${OURS[@]}"
# Two ranks of half of that, with two slots of data and parity each, and as much to spare.
find_arenas $((MIB * 5))

# In the foreground: ends Python alone, which ends its jobs in order and prints the table.
status=0
timeout --foreground --kill-after=40 350 "$python" -m benchmarks capture training --device cuda \
    --mib "$MIB" --rounds 5 --job-seconds 150 --arenas "$arenas" "$@" || status=$?
# Four ranks share the GPU; survivors of each fault keep their process and its CUDA context.
timeout --foreground --kill-after=20 100 "$python" -m benchmarks restart --only plain --seeds 1 ||
    status=$?
exit "$status"
