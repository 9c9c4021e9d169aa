# Sourced by the other files: flags for the folders that you name.
#   CHECKPOINT_DIR  Megatron's own checkpoints, from which a job resumes when memory is lost
#   DRAIN_DIR       snapshots written to disk in the background; a folder that all nodes share

STORAGE_ARGS=()
if [[ -n "${CHECKPOINT_DIR:-}" ]]; then
    STORAGE_ARGS+=(
        --save "$CHECKPOINT_DIR"
        --load "$CHECKPOINT_DIR"
        --save-interval 1000
        --inmem-checkpoint-dir "$CHECKPOINT_DIR"
    )
fi
: "${DRAIN_INTERVAL:=200}"
if [[ -n "${DRAIN_DIR:-}" ]]; then
    STORAGE_ARGS+=(
        --inmem-drain-dir "$DRAIN_DIR"
        --inmem-drain-interval "$DRAIN_INTERVAL"
    )
fi
