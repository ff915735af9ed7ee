#!/usr/bin/env bash
# qwen2_5_72b with its pinned plan: 64 GPUs of dgx_h100, 64 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash qwen2_5_72b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 8" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 16" ;;
  *) echo "usage: bash qwen2_5_72b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/qwen2_5_72b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 80 \
  --seq-length 8192 \
  --hidden-size 8192 \
  --ffn-hidden-size 29568 \
  --num-attention-heads 64 \
  --group-query-attention \
  --num-query-groups 8 \
  --add-qkv-bias \
  --max-position-embeddings 131072 \
  --position-embedding-type rope \
  --rotary-base 1000000 \
  --rotary-percent 1.0 \
  --normalization RMSNorm \
  --norm-epsilon 1e-06 \
  --swiglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 152064 \
  --make-vocab-size-divisible-by 128 \
  --padded-vocab-size 152064 \
  --bf16 \
  --global-batch-size 1024 \
  +nest=pinned nest.plan="$plan" "$@"
