#!/bin/bash
# deputy.sh NODE LOG: requeue this job once NODE, where its batch script ran, has failed.
#
# Without a batch script Slurm (seen with 22.05) lets a --no-kill job hold the nodes that are left
# until its time limit, and nobody supervises them.  supervise.sh starts this on two other nodes,
# and kills the srun of its step once it has heard the first line.
set -u
echo watching
exec >>"$2" 2>&1
job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"

while sleep "${DEPUTY_SECONDS:-10}"; do
    # A controller that does not answer says nothing of the node.
    nodes="$(squeue --noheader --jobs "$job" --format=%N)" && [ -n "$nodes" ] || continue
    scontrol show hostnames "$nodes" | grep -qx "$1" || scontrol requeue "$job"
done
