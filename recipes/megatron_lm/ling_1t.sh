#!/usr/bin/env bash
# ling_1t with its pinned plan: 1024 GPUs of dgx_h100, 256 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash ling_1t.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 128" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 64" ;;
  *) echo "usage: bash ling_1t.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/ling_1t_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 80 \
  --seq-length 4096 \
  --hidden-size 8192 \
  --ffn-hidden-size 18432 \
  --num-attention-heads 64 \
  --group-query-attention \
  --num-query-groups 8 \
  --qk-layernorm \
  --max-position-embeddings 32768 \
  --position-embedding-type rope \
  --rotary-base 600000 \
  --rotary-percent 0.5 \
  --normalization RMSNorm \
  --norm-epsilon 1e-06 \
  --swiglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 157184 \
  --make-vocab-size-divisible-by 128 \
  --num-experts 256 \
  --moe-layer-freq '([0]*4+[1]*76)' \
  --moe-ffn-hidden-size 2048 \
  --moe-router-topk 8 \
  --moe-shared-expert-intermediate-size 2048 \
  --moe-router-enable-expert-bias \
  --moe-router-score-function sigmoid \
  --padded-vocab-size 157184 \
  --bf16 \
  --moe-router-num-groups 8 \
  --moe-router-group-topk 4 \
  --moe-router-topk-scaling-factor 2.5 \
  --global-batch-size 8192 \
  +nest=pinned nest.plan="$plan" "$@"
