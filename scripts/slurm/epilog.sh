#!/bin/bash
# For sites: frees the memory that a job of megatron-ft left on this node.  Slurm runs it on each
# node after a job (Epilog= in slurm.conf), as root, with the job's number and user set.
#
# Only folders that this job's SMPs made, and hold no more, are removed: their lock is free.  A job
# that is requeued then resumes from its drain directory.  Without this script its memory may still
# be there.
set -u

root="/dev/shm/megatron-ft-${SLURM_JOB_UID:?}"
[ -d "$root" ] && [ ! -L "$root" ] || exit 0
for job in "$root"/*; do
    for folder in "$job"/*; do
        [ -d "$folder" ] && [ ! -L "$folder" ] && [ ! -L "$job" ] || continue
        [ "$(cat "$folder/slurm-job" 2>/dev/null)" = "${SLURM_JOB_ID:?}" ] || continue
        flock --nonblock "$folder/smp.lock" rm -rf "$folder" || continue
        # What MPI keeps in .worlds is nobody's once the last node's folder is gone.
        [ -n "$(ls "$job")" ] || rm -rf "$job"/.[!.]*
        rmdir --ignore-fail-on-non-empty "$job"
    done
done
# Also what SMPs have emptied themselves; a folder of this minute may be that of a job that starts.
find "$root" -maxdepth 1 -depth -type d -empty -mmin +1 -delete 2>/dev/null
exit 0
