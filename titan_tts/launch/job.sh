# What a job of `titan-tts launch` does; the script that goes to sbatch has it behind its settings:
#   python, config_arguments: words of commands; config, folder: paths; gpus_per_node, port, max_requeues

say() { echo "titan-tts: $*"; }

# The state that this start has left, its step and its error.
read_state() {
    "${python[@]}" -c '
import json, sys
try:
    with open(sys.argv[1]) as file:
        state = json.load(file)
    if state["time"] >= float(sys.argv[2]):
        print(state["state"], "at step", state["step"], state.get("error", ""))
    else:
        print("unstarted")
except (OSError, ValueError, KeyError, TypeError):
    print("unstarted")
' "$folder/state.json" "$began"
}

restarts=${SLURM_RESTART_COUNT:-0}
began=$(date +%s)
say "job $SLURM_JOB_ID, requeued $restarts times, on $SLURM_JOB_NODELIST; run folder $folder"

# One launcher per node. They meet at the first one, where this script runs. After the first has ended the
# others get a minute for what they still save.
srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks "$SLURM_JOB_NUM_NODES" --ntasks-per-node 1 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task "$SLURM_CPUS_PER_TASK"} --cpu-bind none \
    --kill-on-bad-exit=0 --wait 60 --label \
    "${python[@]}" -m titan_tts train "$config" --nodes "$SLURM_JOB_NUM_NODES" --nproc "$gpus_per_node" \
    --rendezvous "$(hostname):$port" ${config_arguments[@]+"${config_arguments[@]}"} &
step=$!

time_limit=no
trap 'time_limit=yes; say "SIGUSR1: the time limit is near"; kill -USR1 "$step" 2>/dev/null' USR1
trap : TERM # SLURM sends it to the ranks, too
while wait "$step"; kill -0 "$step" 2>/dev/null; do :; done
wait "$step" # a signal's status may have come first
status=$?

found=$(read_state)
state=${found%% *}
say "exit status $status; the run is $found"
case $state-$time_limit in
preempted-* | unstarted-yes) ;;
*) exit "$status" ;;
esac
job_state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
if [[ $job_state != RUNNING ]]; then
    say "not requeued by this script: the job is $job_state" # cancelled, or SLURM requeues it itself
elif ((restarts >= max_requeues)); then
    say "not requeued: this was requeue $restarts of at most $max_requeues; submit again to continue the run"
elif scontrol requeue "$SLURM_JOB_ID"; then
    say "requeued; the next start continues from the checkpoint"
    exit 0
else
    say "could not be requeued; submit again to continue the run"
fi
exit "$status"
