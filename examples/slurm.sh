#!/bin/bash
# Train on two nodes of eight GPUs, and queue the job again until the run is finished:
#   sbatch slurm.sh recipe.yaml runs/256k     (the recipe, and its output folder on a shared file system)
# For one node of eight GPUs, change only the number of nodes, here or on the command line, which comes first:
#   sbatch --nodes=1 slurm.sh recipe.yaml runs/256k
#SBATCH --job-name=ropewalk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8           # one for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@900             # 900 s before the limit; a step, its evaluation and a checkpoint must take less
#SBATCH --requeue

recipe=${1:?give the recipe} output=${2:?give the output folder of the recipe}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=29500
resume=()
[ -f "$output/recipe.yaml" ] && resume=(--resume)

# shellcheck disable=SC2016  # each task expands its own variables
srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID \
  LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE exec ropewalk extend "$@"' ropewalk \
  "$recipe" --set "output=$output" "${resume[@]}"
status=$?
# 75: the run was stopped and wrote a checkpoint.
[ "$status" -eq 75 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
