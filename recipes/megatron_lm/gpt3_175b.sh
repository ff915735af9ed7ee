#!/usr/bin/env bash
# gpt3_175b with its pinned plan: 512 GPUs of dgx_h100, 256 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash gpt3_175b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 64" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 64" ;;
  *) echo "usage: bash gpt3_175b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/gpt3_175b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 96 \
  --seq-length 2048 \
  --hidden-size 12288 \
  --ffn-hidden-size 49152 \
  --num-attention-heads 96 \
  --max-position-embeddings 2048 \
  --position-embedding-type learned_absolute \
  --normalization LayerNorm \
  --norm-epsilon 1e-05 \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --vocab-size 50257 \
  --make-vocab-size-divisible-by 128 \
  --padded-vocab-size 50304 \
  --bf16 \
  --global-batch-size 2048 \
  +nest=pinned nest.plan="$plan" "$@"
