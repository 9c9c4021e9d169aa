# Shell functions for scripts that measure on a machine with a GPU.  Sourced by them.
#
# Callers set -euo pipefail and NAME.  Packages that are missing are installed into `temporary`, a
# folder that is removed at the end; MEGATRON_FT_WHEELS names a folder of wheels for machines
# without a network.

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=${PYTHON:-python3}
temporary=$(mktemp -d)
OURS=(msgspec:msgspec zmq:pyzmq numpy:numpy pyeclib:pyeclib)

finish() {
    mountpoint -q "$temporary/arenas" && umount -l "$temporary/arenas"
    rm -rf "$temporary"
}
trap finish EXIT

fail() {
    echo "$NAME: $1" >&2
    exit 2
}

can_import() {
    PYTHONPATH="$temporary/site${PYTHONPATH:+:$PYTHONPATH}" "$python" -c "import $1" 2>/dev/null
}

free_mib() {
    df --output=avail -m "$1" 2>/dev/null | tail -n 1
}

# need_gpu: stop where torch sees none.
need_gpu() {
    "$python" -c 'import torch
assert torch.cuda.is_available(), f"torch {torch.__version__} sees none"' 2>"$temporary/torch" ||
        fail "$python has no torch that sees a GPU ($(tail -n 1 "$temporary/torch")); name one \
that has: PYTHON=..."
}

# need_packages MODULE:PACKAGE...: install those that cannot be imported.
need_packages() {
    local pair missing=() from=(--retries 1 --timeout 15)
    for pair in "$@"; do
        can_import "${pair%%:*}" || missing+=("${pair##*:}")
    done
    if ((${#missing[@]})); then
        [[ -n ${MEGATRON_FT_WHEELS:-} ]] && from=(--no-index --find-links "$MEGATRON_FT_WHEELS")
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps \
            --target "$temporary/site" "${from[@]}" "${missing[@]}" ||
            fail "$python lacks ${missing[*]}, and pip cannot get them: have wheels for this \
Python in a folder, and name that in MEGATRON_FT_WHEELS"
        for pair in "$@"; do
            can_import "${pair%%:*}" ||
                fail "${pair##*:} was installed and cannot be imported by $python"
        done
    fi
    export PYTHONPATH="$PWD:$temporary/site${PYTHONPATH:+:$PYTHONPATH}"
    # An MPI that came as a wheel has its commands there.
    export PATH="$temporary/site/bin:$PATH"
}

# find_arenas MIB: a tmpfs with so much room, in `arenas`; containers often have a small /dev/shm.
find_arenas() {
    arenas=/dev/shm
    (($(free_mib "$arenas" || echo 0) < $1)) || return 0
    arenas=$temporary/arenas
    mkdir "$arenas"
    mount -t tmpfs -o "size=${1}m" tmpfs "$arenas" ||
        fail "/dev/shm has less than $1 MiB free, and no other tmpfs can be mounted"
}
