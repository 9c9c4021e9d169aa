#!/bin/bash
# deputy.sh NODE LOG: requeue this job once NODE has failed, or its batch script there was killed.
#
# Without a batch script Slurm (seen with 22.05) lets a --no-kill job hold the nodes that are left
# until its time limit, and nobody supervises them.  supervise.sh starts this on two other nodes,
# and kills the srun of its step once it has heard the first line.
set -u

# ended: Slurm ends this step.  If the job failed by SIGKILL, and by nothing else, it runs again.
#
# Slurm sends SIGTERM to all steps of a job that ends, and SIGKILL after KillWait.  The job then has
# a reason: None if it was cancelled, TimeLimit, NonZeroExitCode, or (22.05) JobLaunchFailure where
# a signal ended the script, or slurmctld in its place, because the node was set down.  A job that
# the other deputy requeued, or an administrator, has restarted once more than this one.
ended() {
    trap '' TERM
    local state killed=" Reason=(JobLaunchFailure|RaisedSignal:9).*"
    killed+=" Requeue=1 Restarts=${SLURM_RESTART_COUNT:-0} .* ExitCode=0:9 "
    # The next task of an array continues; it needs no requeue.
    [ -z "${SLURM_ARRAY_JOB_ID:-}" ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$MAX_REQUEUES" ] || exit
    until state="$(scontrol --oneliner show job "$job")" &&
        { ! [[ "$state" =~ $killed ]] || scontrol requeue "$job"; }; do
        sleep 1
    done
    exit
}

job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
job="${job:-$SLURM_JOB_ID}"
trap ended TERM
echo watching
exec >>"$2" 2>&1

while sleep "${DEPUTY_SECONDS:-10}"; do
    # A controller that does not answer says nothing of the node.
    nodes="$(squeue --noheader --jobs "$job" --format=%N)" && [ -n "$nodes" ] || continue
    scontrol show hostnames "$nodes" | grep -qx "$1" || scontrol requeue "$job"
done
# Slurm's signal has reached the sleep first.
ended
