#!/usr/bin/env bash
#SBATCH --nodes=16 --ntasks-per-node=8 --gpus-per-node=8 --exclusive
# Describes the hosts of the allocation, plans for where they lie, and starts the ranks in the plan's order: docs/discovery.md.
# MODEL is a model of the catalogue, TRAIN the training command with the plan's flags (nest-megatron explain plan.yaml prints them).
set -eu

nest-megatron cluster discover --slurm --out cluster.yaml --hosts-out hosts.txt
nest-megatron plan "model=${MODEL:-llama3_8b}" cluster=./cluster.yaml --hosts hosts.txt --write-hostfile ranks.txt out=plan.yaml
SLURM_HOSTFILE=ranks.txt srun --distribution=arbitrary --ntasks="$(wc -l < ranks.txt)" ${TRAIN:-nest-megatron explain plan.yaml}
