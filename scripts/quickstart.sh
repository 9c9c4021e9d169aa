#!/usr/bin/env bash
# Make .venv with everything the demo needs, then run the demo: a training job that loses a node
# and resumes from memory.  Arguments go to `megatron-ft demo`.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/lib/environment.sh"

environment_prepare runtime
exec "$VENV/bin/megatron-ft" demo "$@"
