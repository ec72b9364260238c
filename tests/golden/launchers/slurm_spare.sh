#!/bin/bash
# Training run, written by `weft launch slurm`. It is submitted with sbatch.
#SBATCH --job-name=first
#SBATCH --nodes=3
#SBATCH --ntasks=6
#SBATCH --ntasks-per-node=2
#SBATCH --no-kill
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=2
#SBATCH --time=4:00:00
#SBATCH --partition=gpu
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir="/home/user/a project"
#SBATCH --output="/shared/runs/first/job/slurm-%j.log"

export WEFT_JOB="slurm $SLURM_JOB_ID"   # one writer of the run folder, on whichever nodes it starts again
export WEFT_NODE_KEEPER="slurm $SLURM_JOB_ID"   # snapshots in memory outlive the ranks
srun --overlap --no-kill --nodes=3 --ntasks=3 --ntasks-per-node=1 /shared/venv/bin/python -m weft.run.node_keeper < /dev/null &
srun --overlap --no-kill --nodes=3 --ntasks=3 --ntasks-per-node=1 /shared/venv/bin/python -m weft.run.batch_watch < /dev/null &   # queues the job again if the node of this script is lost
queued=${SLURM_RESTART_COUNT:-0}
failures=0
while true; do
  export SLURM_RESTART_COUNT=$((queued + failures))
  srun --kill-on-bad-exit=0 --wait=60 --overlap --nodes=2 --ntasks=4 --cpus-per-task=8 /shared/venv/bin/python -m weft train /shared/runs/first/job/config.toml
  code=$?
  case $code in
    0 | 2) exit $code ;;
    75) echo "weft: saved; the job is queued again"; scontrol requeue "$SLURM_JOB_ID"; exit $code ;;
  esac
  failures=$((failures + 1))
  if [ $failures -gt 3 ]; then exit $code; fi
  while true; do
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%D)
    srun --overlap --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 true && break
    sleep 5
  done
  if [ "$nodes" -lt 2 ]; then
    echo "weft: $nodes nodes are left, 2 are needed; the job is queued again"
    scontrol requeue "$SLURM_JOB_ID"; exit $code
  fi
  echo "weft: exit code $code; start $failures of 3 after a failure"
done
