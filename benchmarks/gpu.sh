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
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
MIB=2048
# Two ranks of half of that, with two slots of data and parity each, and as much to spare.
MIB_OF_FILES=$((MIB * 5))
temporary=$(mktemp -d)
finish() {
    mountpoint -q "$temporary/arenas" && umount -l "$temporary/arenas"
    rm -rf "$temporary"
}
trap finish EXIT

fail() {
    echo "gpu.sh: $1" >&2
    exit 2
}

can_import() {
    PYTHONPATH="$temporary/site${PYTHONPATH:+:$PYTHONPATH}" "$python" -c "import $1" 2>/dev/null
}

free_mib() {
    df --output=avail -m "$1" 2>/dev/null | tail -n 1
}

"$python" -c 'import torch
assert torch.cuda.is_available(), f"torch {torch.__version__} sees none"' 2>"$temporary/torch" ||
    fail "$python has no torch that sees a GPU ($(tail -n 1 "$temporary/torch")); name one that \
has: PYTHON=..."

missing=()
for pair in msgspec:msgspec zmq:pyzmq numpy:numpy pyeclib:pyeclib; do
    can_import "${pair%%:*}" || missing+=("${pair##*:}")
done
if ((${#missing[@]})); then
    from=(--retries 1 --timeout 15)
    [[ -n ${MEGATRON_FT_WHEELS:-} ]] && from=(--no-index --find-links "$MEGATRON_FT_WHEELS")
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
        --target "$temporary/site" "${from[@]}" "${missing[@]}" ||
        fail "$python lacks ${missing[*]}, and pip cannot get them: have wheels for this Python \
in a folder, and name that in MEGATRON_FT_WHEELS"
    for module in msgspec zmq numpy pyeclib; do
        can_import "$module" || fail "$module was installed and cannot be imported by $python"
    done
fi
export PYTHONPATH="$PWD:$temporary/site${PYTHONPATH:+:$PYTHONPATH}"

# Containers often have a /dev/shm of 64 MiB.
arenas=/dev/shm
if (($(free_mib "$arenas" || echo 0) < MIB_OF_FILES)); then
    arenas=$temporary/arenas
    mkdir "$arenas"
    mount -t tmpfs -o "size=${MIB_OF_FILES}m" tmpfs "$arenas" ||
        fail "/dev/shm has less than $MIB_OF_FILES MiB free, and no other tmpfs can be mounted"
fi

# In the foreground: ends Python alone, which ends its jobs in order and prints the table.
status=0
timeout --foreground --kill-after=40 350 "$python" -m benchmarks capture training --device cuda \
    --mib "$MIB" --rounds 5 --job-seconds 150 --arenas "$arenas" "$@" || status=$?
# Four ranks share the GPU; survivors of each fault keep their process and its CUDA context.
timeout --foreground --kill-after=20 100 "$python" -m benchmarks restart --only plain --seeds 1 ||
    status=$?
exit "$status"
