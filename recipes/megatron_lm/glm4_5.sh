#!/usr/bin/env bash
# glm4_5 with its pinned plan: 256 GPUs of dgx_h100, 128 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash glm4_5.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 32" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 32" ;;
  *) echo "usage: bash glm4_5.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/glm4_5_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 92 \
  --seq-length 4096 \
  --hidden-size 5120 \
  --ffn-hidden-size 12288 \
  --num-attention-heads 96 \
  --group-query-attention \
  --num-query-groups 8 \
  --kv-channels 128 \
  --add-qkv-bias \
  --qk-layernorm \
  --max-position-embeddings 131072 \
  --position-embedding-type rope \
  --rotary-base 1000000 \
  --rotary-percent 0.5 \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --swiglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 151552 \
  --make-vocab-size-divisible-by 128 \
  --num-experts 160 \
  --moe-layer-freq '([0]*3+[1]*89)' \
  --moe-ffn-hidden-size 1536 \
  --moe-router-topk 8 \
  --moe-shared-expert-intermediate-size 1536 \
  --moe-router-enable-expert-bias \
  --moe-router-score-function sigmoid \
  --mtp-num-layers 1 \
  --padded-vocab-size 151552 \
  --bf16 \
  --moe-router-topk-scaling-factor 2.5 \
  --global-batch-size 2048 \
  +nest=pinned nest.plan="$plan" "$@"
