# Shell functions that make the virtual environment .venv.  Sourced by quickstart.sh and test.sh.
#
# Callers set -euo pipefail, then call `environment_prepare runtime|dev`.  It leaves these set:
#   REPO    root of the checkout          VENV   the virtual environment
# For another one, with another torch, they call `environment_with_torch RELEASE` before that.
#
# PYTHON=<interpreter> chooses the Python that the environment is made with.

REPO="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
VENV="$REPO/.venv"
LOG="$VENV/install.log"
CONSTRAINTS="$REPO/requirements/constraints.txt"
MINIMUM_FREE_GIB=3

# Releases that the tests also run, each in a folder .venv/<package>/<release>.
OLDER_MEGATRON_RELEASES=(0.17.1 0.18.2)
OLDER_DEEPSPEED_RELEASES=(0.18.9)

# DeepSpeed's operators are compiled when one is first used, if ever.
export DS_BUILD_OPS=0

# A constraint, a target or a path from the user's shell would change what is installed or imported.
unset PIP_CONSTRAINT PIP_TARGET PIP_PREFIX PYTHONPATH PYTHONHOME
# Without bytecode on disk each of a job's many processes compiles the whole package.
unset PYTHONDONTWRITEBYTECODE
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0
# Python compiles what is imported, a part of what pip would compile here.
export PIP_COMPILE=0

# fail MESSAGE...: one line per argument to stderr, then exit 1.
fail() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '       %s\n' "$@" >&2
    exit 1
}

# python_usable COMMAND: true if COMMAND is a Python 3.10 to 3.13 with venv.  It is run to find
# out, because version managers put commands on PATH that do nothing but print an error.
python_usable() {
    "$1" -c 'import sys, venv; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
        >/dev/null 2>&1
}

# python_found COMMAND: what a message says about a command that is not usable.
python_found() {
    if command -v "$1" >/dev/null; then
        "$1" --version 2>&1 | head -n 1
    else
        echo "no command $1"
    fi
}

# find_python: print the interpreter to use.  That of an existing .venv stays in use until PYTHON
# names another; else 3.11 is looked for first, which most is tested with.
find_python() {
    local name
    if [ -n "${PYTHON:-}" ]; then
        python_usable "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.10 to 3.13 with venv" \
            "found: $(python_found "$PYTHON")"
        base_python "$PYTHON"
        return
    fi
    for name in "$VENV/bin/python" python3.11 python3.12 python3.13 python3.10 python3 python; do
        if python_usable "$name"; then
            base_python "$name"
            return
        fi
    done
    fail "no Python 3.10 to 3.13 with the venv module on PATH" "found: $(python_found python3)" \
        "install one (on Debian: python3 and python3-venv), or set PYTHON=/path/to/python3.11"
}

# base_python COMMAND: path of the interpreter behind COMMAND, which may be that of an environment.
base_python() {
    "$1" -c 'import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
}

# check_machine PYTHON: what the build needs is there, or a message says what is missing.
check_machine() {
    local free_kib
    free_kib="$(df -Pk "$REPO" | awk 'NR == 2 { print $4 }')"
    if [ "$free_kib" -lt $((MINIMUM_FREE_GIB << 20)) ]; then
        fail "$((free_kib >> 10)) MiB free where $REPO is; $MINIMUM_FREE_GIB GiB are needed" \
            "(and about 10 GiB if pip chooses a torch build with CUDA)"
    fi
    # megatron-core is compiled below Python 3.12 only; see install_megatron.
    if "$1" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
        command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null ||
            fail "no C++ compiler: megatron-core has one extension module to compile" \
                "install one (on Debian: g++), name it in CXX, or use Python 3.12 or 3.13"
        "$1" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
            fail "Python.h of $1 is missing, which compiling megatron-core needs" \
                "install it (on Debian: python3-dev), or use Python 3.12 or 3.13"
    fi
}

# fingerprint PYTHON LEVEL: hash of all that decides what the environment contains.
fingerprint() {
    {
        "$1" --version
        printf '%s\n' "$REPO" "$2" "$REPO"/*/__init__.py
        cat "$REPO/pyproject.toml" "$REPO/setup.py" "$REPO"/megatron_ft/core/*.c "$CONSTRAINTS" \
            "$REPO/scripts/lib/environment.sh"
    } | cksum
}

# step LABEL COMMAND...: run one step quietly into the log; progress and time on one line.
step() {
    local label="$1" start=$SECONDS
    shift
    STEP=$((STEP + 1))
    printf '[%d/%d] %s ... ' "$STEP" "$STEPS" "$label"
    printf '\n[%s] %s\n' "$label" "$*" >>"$LOG"
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        printf 'FAILED after %d s\n\n' $((SECONDS - start))
        tail -n 25 "$LOG" >&2
        fail "$label failed; the whole log is $LOG"
    fi
    printf '%d s\n' $((SECONDS - start))
}

pip_install() {
    "$VENV/bin/python" -m pip install --constraint "$CONSTRAINTS" "$@"
}

# make_venv PYTHON: a fresh .venv, with pip even where ensurepip was taken out of Python.
make_venv() {
    if "$1" -c 'import ensurepip' 2>/dev/null; then
        "$1" -m venv "$VENV"
    else
        "$1" -m venv --without-pip "$VENV" && "$1" -m pip --python "$VENV/bin/python" install pip
    fi
}

# megatron_from_source: pip's flags for megatron-core, one a line.  Releases that contain
# megatron.training declare Python >= 3.12 but run on older ones when built from the source package;
# the build finds numpy and pybind11 in the environment.
megatron_from_source() {
    "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' ||
        printf '%s\n' --ignore-requires-python --no-build-isolation --no-binary megatron-core
}

install_megatron() {
    local flags
    mapfile -t flags < <(megatron_from_source)
    pip_install --no-deps "${flags[@]}" megatron-core
}

# Muon, which --optimizer muon of Megatron imports.  It declares Python >= 3.12 too, and what is
# imported of it runs on older ones.
install_muon() {
    pip_install --no-deps --ignore-requires-python emerging-optimizers absl-py
}

# DeepSpeed comes as source, whose build asks the torch of the environment what it can do.
install_deepspeed() {
    pip_install --no-build-isolation deepspeed
}

# install_beside PACKAGE RELEASE PIP-FLAGS...: complete or not there at all.
install_beside() {
    local folder="$VENV/$1/$2"
    [ ! -d "$folder" ] || return 0
    rm -rf "$folder.part"
    "$VENV/bin/python" -m pip install --target "$folder.part" --no-deps "${@:3}" "$1==$2"
    mv "$folder.part" "$folder"
}

install_megatron_release() {
    local flags
    mapfile -t flags < <(megatron_from_source)
    install_beside megatron-core "$1" "${flags[@]}"
}

install_deepspeed_release() {
    install_beside deepspeed "$1" --no-build-isolation
}

# install_older_releases: all of them, into a log of its own; runs beside the steps that follow.
install_older_releases() {
    local release
    for release in "${OLDER_MEGATRON_RELEASES[@]}"; do
        install_megatron_release "$release" || return 1
    done
    for release in "${OLDER_DEEPSPEED_RELEASES[@]}"; do
        install_deepspeed_release "$release" || return 1
    done
}

# await_older_releases PID: wait for them; what they have said is shown if that failed.
await_older_releases() {
    wait "$1" || {
        cat "$VENV/older.log"
        return 1
    }
}

# check_result: what was installed is there.  megatron.training is looked for, not imported: on a
# machine without a GPU it cannot be before our CPU adapter has run.  Importing deepspeed takes long.
check_result() {
    "$VENV/bin/python" -c '
import importlib.util, megatron_ft, mpi4py, msgspec, numpy, torch, zmq
assert importlib.util.find_spec("megatron.training"), "megatron-core lacks megatron.training"
assert importlib.util.find_spec("deepspeed"), "deepspeed is missing"'
}

# slurm_prepare: a Slurm for the tests; without one, those tests are skipped.
slurm_prepare() {
    command -v slurmctld srun munged >/dev/null || install_for_tests slurm-wlm munge
}

# browser_prepare: a browser for the tests of the report; without one, those tests are skipped.
browser_prepare() {
    command -v chromium >/dev/null || install_for_tests chromium fonts-dejavu-core
}

# install_for_tests PACKAGE...: the distribution's packages; says what is missing where they cannot
# be had.
install_for_tests() {
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
        echo "no $1 here, and no root with apt-get to install it: its tests are skipped"
        return 0
    fi
    printf 'installing %s for the tests ... ' "$*"
    if (export DEBIAN_FRONTEND=noninteractive
        timeout 120 apt-get update &&
            timeout 300 apt-get install -y --no-install-recommends "$@") >>"$LOG" 2>&1 </dev/null; then
        echo done
    else
        echo "not possible (see $LOG): the tests of $1 are skipped"
    fi
}

# environment_with_torch RELEASE: an environment below .venv that differs in torch alone; the tests
# find older releases of frameworks in .venv.
environment_with_torch() {
    VENV="$REPO/.venv/with-torch/$1"
    LOG="$VENV/install.log"
    CONSTRAINTS="$VENV.txt"
    OLDER_MEGATRON_RELEASES=()
    OLDER_DEEPSPEED_RELEASES=()
    mkdir -p "$VENV"
    sed "s/^torch==.*/torch==$1/" "$REPO/requirements/constraints.txt" >"$CONSTRAINTS"
}

# environment_prepare LEVEL: make or complete .venv; nothing to do takes well under a second.
environment_prepare() {
    local level="$1" extras="mpi" python print last=""
    python="$(find_python)"
    [ "$level" = runtime ] || extras="mpi,dev"
    print="$(fingerprint "$python" "$level")"
    [ ! -f "$VENV/.prepared-$level" ] || last="$(cat "$VENV/.prepared-$level")"
    if [ "$last" = "$print" ] && "$VENV/bin/python" -c 'import megatron_ft' 2>/dev/null; then
        return 0
    fi
    check_machine "$python"
    environment_install "$python" "$level" "$extras"
    printf '%s\n' "$print" >"$VENV/.prepared-$level"
    # What dev contains, runtime is satisfied with.
    [ "$level" = runtime ] || fingerprint "$python" runtime >"$VENV/.prepared-runtime"
}

# environment_install PYTHON LEVEL EXTRAS: the steps, in the one order in which each finds what it
# needs.
environment_install() {
    local made_for older=""
    made_for="$("$1" --version) $REPO"
    STEP=0
    STEPS=7
    [ "$2" = runtime ] || STEPS=9
    # Scripts in an environment hold its path, so one that was moved or copied is made again.
    if [ "$(cat "$VENV/.made-for" 2>/dev/null)" != "$made_for" ]; then
        rm -rf "$VENV"
    fi
    mkdir -p "$VENV"
    rm -f "$VENV"/.prepared-*
    : >"$LOG"
    step "making ${VENV#"$REPO/"} with $("$1" --version)" make_venv "$1"
    printf '%s\n' "$made_for" >"$VENV/.made-for"
    # torch comes first and alone, so that no other package's wishes choose its version.
    step "installing torch (a large download)" pip_install torch
    step "installing build tools and numpy" pip_install \
        numpy pybind11 packaging 'setuptools>=80' wheel pyyaml typing_extensions
    if [ "$2" != runtime ]; then
        install_older_releases >"$VENV/older.log" 2>&1 </dev/null &
        older=$!
    fi
    step "installing megatron-core" install_megatron
    [ "$2" = runtime ] || step "installing emerging-optimizers" install_muon
    step "installing deepspeed" install_deepspeed
    step "installing megatron-ft with $3" pip_install --no-build-isolation -e "$REPO[$3]"
    [ -z "$older" ] || step "installing older releases beside them" await_older_releases "$older"
    step "checking the result" check_result
}
