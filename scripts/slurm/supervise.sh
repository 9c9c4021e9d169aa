# The part that all our batch scripts share; they source it after their site variables.
# shellcheck shell=bash
#
# supervise COMMAND...: run COMMAND under `megatron-ft run` in this allocation to its end, then
# requeue the job or end it.  What ends how, and with which exit code: docs/how-to/slurm.md.

# safe_name NAME: the name itself where it can name our job, else one that is made of it.  Slurm takes
# any: with blanks, with letters of any language.
safe_name() {
    local LC_ALL=C safe="${1//[^A-Za-z0-9._-]/-}" sum
    if [ "$safe" != "$1" ] || [[ "$safe" == [._-]* ]]; then
        sum="$(cksum <<<"$1")"
        safe="job-$safe-${sum%% *}"
    fi
    echo "$safe"
}

# The tasks of an array (--array=1-N%1) continue one another: they share the array's state.
: "${JOB:=$(safe_name "${SLURM_JOB_NAME:?run this inside a Slurm job}")${SLURM_ARRAY_JOB_ID:+-$SLURM_ARRAY_JOB_ID}}"
: "${CHECK_ONLY:=}"
: "${STATE_DIR:=$PWD/megatron-ft-state}"
: "${DRAIN_DIR:=$PWD/megatron-ft-checkpoints}"
: "${DRAIN_INTERVAL:=500}"
: "${DRAIN_MINUTES:=30}"
: "${DRAIN_STOP_SECONDS:=${MEGATRON_FT_DRAIN_STOP_SECONDS:-240}}"
: "${SPARES:=1}"
: "${RANKS_PER_NODE:=1}"
: "${PROTECT:=}"
: "${AFTER_TERM:=requeue}"
: "${AFTER_EXIT:=stop}"
: "${ON_NO_SPARE:=requeue}"
: "${QUEUE_SECONDS:=120}"
: "${MAX_REQUEUES:=100}"
# How long Slurm is asked again while its controller is away.
: "${ASK_SECONDS:=3600}"
: "${RUN_FLAGS:=}"
: "${SRUN_FLAGS:=}"
: "${EXPORT_DIR:=}"
: "${ARENA_DIR:=/dev/shm/megatron-ft-$(id -u)}"

SUPERVISOR_STARTS=3
DEPUTY=megatron-ft-deputy
DEPUTY_START_SECONDS=60
# How often deputies look for this node, and this node for them.
: "${DEPUTY_SECONDS:=10}"
export DEPUTY_SECONDS MAX_REQUEUES

# Not a flag: the training command may have one of its own.
export MEGATRON_FT_DRAIN_STOP_SECONDS="$DRAIN_STOP_SECONDS"

# one_of NAME VALUE ALLOWED...: ends with 2 if a site variable has none of the values it may have.
one_of() {
    local name="$1" value="$2"
    shift 2
    [[ " $* " != *" $value "* ]] || return 0
    echo "megatron-ft: $name is '$value'; it may be: $*" >&2
    exit 2
}
one_of AFTER_TERM "$AFTER_TERM" requeue stop
one_of AFTER_EXIT "$AFTER_EXIT" requeue stop
one_of ON_NO_SPARE "$ON_NO_SPARE" requeue stop hold shrink auto
if ! [[ "$MAX_REQUEUES" =~ ^[0-9]+$ ]]; then
    echo "megatron-ft: MAX_REQUEUES is '$MAX_REQUEUES'; give a whole number >= 0" >&2
    exit 2
fi
if ! command -v megatron-ft >/dev/null; then
    echo "megatron-ft: there is no command megatron-ft in '${VENV:-}/bin', nor elsewhere on PATH:" \
        "export VENV, the Python environment that has it on all nodes" >&2
    exit 2
fi

# By the batch script: sbatch may have been given another --signal.
warned="$(sed -n 's/^#SBATCH --signal=.*@\([0-9]*\)$/\1/p' "$0" 2>/dev/null)"
if [ -n "$warned" ] && [ "$warned" -le "${DRAIN_STOP_SECONDS%.*}" ]; then
    echo "megatron-ft: warning: DRAIN_STOP_SECONDS is $DRAIN_STOP_SECONDS, but the --signal of the" \
        "batch script leaves only $warned s before the time limit: raise it" >&2
fi

# How Slurm calls this one job: one task of an array has the array's own number.
THIS="$SLURM_JOB_ID"
[ -z "${SLURM_ARRAY_JOB_ID:-}" ] || THIS="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
on_no_spare=stop
case "$ON_NO_SPARE" in
    hold | shrink | auto) on_no_spare="$ON_NO_SPARE" ;;
esac
# What this job expects of its queue: 0 where nothing starts it again, which `auto` must know.
queue_seconds="$QUEUE_SECONDS"
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then
    [ "$SLURM_ARRAY_TASK_ID" != "${SLURM_ARRAY_TASK_MAX:-}" ] || queue_seconds=0
elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_REQUEUES" ]; then
    queue_seconds=0
fi
stop_for_good=""
told=""
told_after=""
child=""

# Slurm sends SIGTERM some minutes before the time limit (see --signal in the batch scripts).
# A second one would cut the drain short, and scancel repeats what it sends to a task of an array.
on_term() {
    : "${told_after:=$SECONDS}"
    [ "$told" != "${child:-early}" ] || return 0
    told="${child:-early}"
    [ -z "$child" ] || kill -TERM "$child" 2>/dev/null
}
# scancel --batch --signal=USR1 JOB: drain, and do not requeue.
on_usr1() {
    stop_for_good=yes
    on_term
}
trap on_term TERM
trap on_usr1 USR1

# run_once COMMAND...: the exit code of one supervisor, also where signals interrupt the waiting.
run_once() {
    # RUN_FLAGS are several words.
    # shellcheck disable=SC2086
    megatron-ft ${CHECK_ONLY:-run} --launcher slurm --job "$JOB" --spares "$SPARES" \
        --ranks-per-node "$RANKS_PER_NODE" ${PROTECT:+--protect "$PROTECT"} --arena-dir "$ARENA_DIR" \
        --state-dir "$STATE_DIR" --drain-dir "$DRAIN_DIR" \
        --drain-interval "$DRAIN_INTERVAL" --drain-minutes "$DRAIN_MINUTES" --on-no-spare "$on_no_spare" \
        --queue-seconds "$queue_seconds" \
        ${EXPORT_DIR:+--drain-export-dir "$EXPORT_DIR"} \
        ${SRUN_FLAGS:+"--srun-flags=$SRUN_FLAGS"} $RUN_FLAGS -- "$@" &
    child=$!
    while :; do
        wait "$child"
        code=$?
        kill -0 "$child" 2>/dev/null || break
    done
    wait "$child" 2>/dev/null
    local again=$?
    [ "$again" -eq 127 ] || code=$again
    # SIGTERM while Python was starting: nothing was drained.
    [ "$code" -ne 143 ] || code=14
    child=""
}

AWAY='contact slurm|timed out|refused|connect failure|Zero Bytes|ommunication|Transport|temporarily'

# asked COMMAND...: what a command of Slurm's prints.  While the controller does not answer it is asked
# again, with longer and longer waits, for up to ASK_SECONDS; fails then, or where Slurm refuses.
asked() {
    local pause=1 begun="$SECONDS" files ended=0
    files="$(mktemp -d)"
    # Not in a subshell: Slurm may end this script in the midst of a request.
    until "$@" >"$files/said" 2>"$files/errors"; do
        if ! grep -qE "$AWAY" "$files/errors" || [ "$((SECONDS - begun))" -ge "$ASK_SECONDS" ]; then
            ended=1
            break
        fi
        [ "$pause" -gt 1 ] || echo "megatron-ft: Slurm does not answer \`$1\`: it is asked again" \
            "for up to $ASK_SECONDS s" >&2
        sleep "$pause"
        pause=$((pause < 30 ? 2 * pause : 30))
    done
    cat "$files/said"
    [ "$ended" -eq 0 ] || cat "$files/errors" >&2
    rm -rf "$files"
    return "$ended"
}

# For one task of a command on each of some nodes of this job; the batch step's own numbers of
# tasks and nodes would count otherwise; and with `sbatch --export=NONE` srun would export nothing.
SRUN_HERE=(env -u SLURM_NNODES -u SLURM_NTASKS -u SLURM_NPROCS -u SLURM_NTASKS_PER_NODE
    -u SLURM_TASKS_PER_NODE -u SLURM_EXPORT_ENV srun --overlap --no-kill --kill-on-bad-exit=0 --mem=0)

# start_deputy NODE: a step that watches this node from there; fails if it does not begin.
#
# An srun is two processes (22.05), and the second cancels the step when the first is killed.  This
# node may lose its processes one after the other, so both are killed once the step has begun: it
# then continues by itself, and ends with the job.
start_deputy() {
    local said srun second began=1
    exec {said}< <(exec "${SRUN_HERE[@]}" --nodes=1 --ntasks=1 --nodelist="$1" --job-name="$DEPUTY" \
        bash "${BASH_SOURCE[0]%/*}/deputy.sh" "$SLURMD_NODENAME" "$STATE_DIR/deputies.log" \
        2>>"$STATE_DIR/deputies.log")
    srun=$!
    if read -r -t "$DEPUTY_START_SECONDS" <&"$said"; then
        began=0
        second="$(grep -ls "^PPid:[[:space:]]*$srun\$" /proc/[0-9]*/status | cut -d/ -f3)"
        # It comes first, as it waits for the end of the first; it may be no process, or several.
        # shellcheck disable=SC2086
        kill -KILL $second "$srun" 2>/dev/null
    else
        kill -TERM "$srun" 2>/dev/null
    fi
    exec {said}<&-
    return "$began"
}

# keep_deputies: have two other nodes watch for the loss of this one, which would end this script
# and nothing else.  A deputy that is lost, as Slurm sees it, gets a successor.
keep_deputies() {
    local others steps node count unwatched=""
    mkdir -p "$STATE_DIR"
    # Without control groups this outlives a script that is killed, and must not serve the next one.
    while kill -0 "$$" 2>/dev/null; do
        # A controller that does not answer says nothing of the deputies.
        others="$({ scontrol show hostnames "$(squeue --noheader --jobs "$THIS" --format=%N)" |
            grep -vx "$SLURMD_NODENAME"; } 2>>"$STATE_DIR/deputies.log")"
        if steps="$(squeue --steps --noheader --jobs "$SLURM_JOB_ID" --format='%N %j' \
            2>>"$STATE_DIR/deputies.log")"; then
            count=0
            for node in $others; do
                ! grep -qx "$node $DEPUTY" <<<"$steps" || count=$((count + 1))
            done
            for node in $others; do
                [ "$count" -lt 2 ] || break
                if grep -qx "$node $DEPUTY" <<<"$steps"; then
                    continue
                elif start_deputy "$node"; then
                    count=$((count + 1))
                elif [[ " $unwatched " != *" $node "* ]]; then
                    unwatched+=" $node"
                    echo "megatron-ft: warning: no deputy could be started on $node" \
                        "($STATE_DIR/deputies.log says why): it is tried again. Without a deputy the" \
                        "loss of $SLURMD_NODENAME, where this script runs, does not requeue the job" >&2
                fi
            done
        fi
        sleep "$DEPUTY_SECONDS"
    done
}

# crashed: the supervisor came to an end of which it knew nothing, by a signal or its own error.
crashed() {
    [ "$code" -eq 1 ] || { [ "$code" -gt 128 ] && [ "$code" -ne 130 ]; }
}

# A supervisor that crashed left its SMPs and arenas; the next one takes them over.
run_job() {
    local start
    for start in $(seq "$SUPERVISOR_STARTS"); do
        code=14
        [ "$told" != early ] || return 0
        run_once "$@"
        crashed || return 0
        echo "megatron-ft: the supervisor was killed ($code);" \
            "start $start of $SUPERVISOR_STARTS is over"
    done
}

# led_by_another: a supervisor of another script has the job; ours, if any, has given back its lock.
led_by_another() {
    local lock="$STATE_DIR/$JOB/lock"
    [ -e "$lock" ] && ! flock --nonblock "$lock" true
}

# requeue REASON: the job runs again; returns where Slurm does not let it.
requeue() {
    local count="${SLURM_RESTART_COUNT:-0}" state
    # A job that was cancelled without a signal is over for Slurm; requeueing would revive it.
    if ! state="$(asked squeue --noheader --jobs "$THIS" --format=%T)"; then
        echo "megatron-ft: $1, but Slurm does not say how job $SLURM_JOB_ID is: not requeued;" \
            "submit it again" >&2
        return 0
    fi
    [ "$state" = RUNNING ] && [ "$count" -lt "$MAX_REQUEUES" ] || return 0
    echo "megatron-ft: $1: requeueing job $SLURM_JOB_ID (time $((count + 1)))"
    trap - TERM USR1
    if asked scontrol requeue "$SLURM_JOB_ID"; then
        # Slurm ends this script with the job, and perhaps what it waits for first: nothing may follow.
        exec sleep infinity
    fi
    echo "megatron-ft: the job could not be requeued" >&2
}

# What free_memory does on a node, in folder $0 for Slurm job $1.
# shellcheck disable=SC2016
FREE='for folder in "$0"/*; do
    [ "$(cat "$folder/slurm-job" 2>/dev/null)" != "$1" ] || rm -rf "$folder"
done
rm -rf "$0/.worlds"
rmdir --ignore-fail-on-non-empty "$0" 2>/dev/null || true'

# free_memory: remove this Slurm job's arenas from the nodes that are left.  What an earlier one
# left there, and this one has not taken over, may be all that the next one can resume from.
free_memory() {
    local nodes count
    nodes="$(squeue --noheader --jobs "$THIS" --format=%N 2>/dev/null)"
    count="$(scontrol show hostnames "$nodes" 2>/dev/null | wc -l)"
    "${SRUN_HERE[@]}" --nodes="$count" --ntasks="$count" --nodelist="$nodes" --output=none \
        bash -c "$FREE" "${ARENA_DIR:?}/${JOB:?}" "$SLURM_JOB_ID" 2>/dev/null ||
        echo "megatron-ft: Slurm did not free the memory of this job on all nodes; the site's epilog" \
            "does, or \`megatron-ft clean\` there" >&2
}

# too_short: Slurm warned of the time limit as soon as the job began, and will do so each time.
too_short() {
    local left
    [ "$code" -eq 14 ] && [ -n "$told_after" ] && [ "$told_after" -lt 60 ] || return 1
    left="$(squeue --noheader --jobs "$THIS" --format=%L 2>/dev/null)"
    [[ "$left" =~ ^[0-9]{1,2}:[0-9]{2}$ ]] || return 1
    echo "megatron-ft: told to stop after $told_after s, with $left left: --time must be longer than" \
        "what --signal leaves before its end; not requeued"
}

# go_on REASON: the job runs again, or the next task of its array does.  Without a reason neither.
go_on() {
    if [ -z "${SLURM_ARRAY_JOB_ID:-}" ]; then
        [ -z "$1" ] || requeue "$1"
    elif [ -n "$1" ]; then
        echo "megatron-ft: $1: the next task of array $SLURM_ARRAY_JOB_ID resumes, if there is one"
        # What is not on disk may at best be found by a task on the same nodes.
        case "$code" in
            14 | 15 | 16) exit "$code" ;;
        esac
    else
        scancel --state=PENDING "$SLURM_ARRAY_JOB_ID"
    fi
}

supervise() {
    local reason="" keeper
    if [ -n "$CHECK_ONLY" ]; then
        CHECK_ONLY=doctor
        run_once "$@"
        exit "$code"
    fi
    keep_deputies &
    keeper=$!
    # Else bash would say that it was terminated.
    disown "$keeper"
    run_job "$@"
    kill "$keeper" 2>/dev/null
    echo "megatron-ft: the supervisor ended with $code"
    # Memory, tasks and hosts are the other one's.
    ! led_by_another || exit "$code"
    # Replacement hosts are jobs of their own, which end by themselves only after a while.
    scancel --me --name="megatron-ft-host-of-$SLURM_JOB_ID" 2>/dev/null
    case "$code" in
        13 | 14) [ "$AFTER_TERM" != requeue ] || reason="told to stop" ;;
        11) [ "$ON_NO_SPARE" = stop ] || reason="no spare is left" ;;
        16) reason="Slurm was away" ;;
        # The tasks of an array are there to continue.
        15) [ "$AFTER_EXIT${SLURM_ARRAY_JOB_ID:-}" = stop ] || reason="training stopped itself" ;;
    esac
    [ -z "$stop_for_good" ] && ! too_short || reason=""
    go_on "$reason"
    [ "$code" -eq 0 ] || free_memory
    exit "$code"
}
