#!/usr/bin/env bash
# Figures of a machine with a GPU, as one table, in under eight minutes.
#
#   benchmarks/gpu.sh [--markdown FILE] [--json FILE] [--mib 4096]
#
# Needs nothing but a Python whose torch sees the GPU: PYTHON, or python3.  Our few packages are
# installed into a temporary folder; MEGATRON_FT_WHEELS names a folder of wheels for machines
# without a network.  Only ratios within one run are compared.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu.sh: $python has no torch that sees a GPU; name one that has: PYTHON=..." >&2
    exit 2
fi
missing=()
for pair in msgspec:msgspec zmq:pyzmq numpy:numpy pyeclib:pyeclib; do
    "$python" -c "import ${pair%%:*}" 2>/dev/null || missing+=("${pair##*:}")
done
if ((${#missing[@]})); then
    from=()
    [[ -n ${MEGATRON_FT_WHEELS:-} ]] && from=(--no-index --find-links "$MEGATRON_FT_WHEELS")
    "$python" -m pip install --quiet --no-deps --target "$site" ${from[@]+"${from[@]}"} "${missing[@]}"
fi
export PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
timeout 470 "$python" -m benchmarks capture training --device cuda --mib 4096 --rounds 7 "$@"
