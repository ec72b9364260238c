#!/bin/bash
# Training run, written by `weft launch slurm`. It is submitted with sbatch.
#SBATCH --job-name=first
#SBATCH --nodes=2
#SBATCH --ntasks=4
#SBATCH --ntasks-per-node=2
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
queued=${SLURM_RESTART_COUNT:-0}
failures=0
while true; do
  export SLURM_RESTART_COUNT=$((queued + failures))
  srun --kill-on-bad-exit=0 --wait=60 --cpus-per-task=8 /shared/venv/bin/python -m weft train /shared/runs/first/job/config.toml
  code=$?
  case $code in
    0 | 2) exit $code ;;
    75) echo "weft: saved; the job is queued again"; scontrol requeue "$SLURM_JOB_ID"; exit $code ;;
  esac
  failures=$((failures + 1))
  if [ $failures -gt 3 ]; then exit $code; fi
  echo "weft: exit code $code; start $failures of 3 after a failure"
done
