#!/usr/bin/env bash
# phi4_14b with its pinned plan: 64 GPUs of dgx_h100, 64 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash phi4_14b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 8" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 16" ;;
  *) echo "usage: bash phi4_14b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/phi4_14b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 40 \
  --seq-length 4096 \
  --hidden-size 5120 \
  --ffn-hidden-size 17920 \
  --num-attention-heads 40 \
  --group-query-attention \
  --num-query-groups 10 \
  --max-position-embeddings 16384 \
  --position-embedding-type rope \
  --rotary-base 250000 \
  --rotary-percent 1.0 \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --swiglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 100352 \
  --make-vocab-size-divisible-by 128 \
  --padded-vocab-size 100352 \
  --bf16 \
  --global-batch-size 1024 \
  +nest=pinned nest.plan="$plan" "$@"
