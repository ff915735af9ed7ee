#!/usr/bin/env bash
# moonlight_16b_a3b with its pinned plan: 64 GPUs of dgx_h100, 64 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash moonlight_16b_a3b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 8" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 16" ;;
  *) echo "usage: bash moonlight_16b_a3b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/moonlight_16b_a3b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 27 \
  --seq-length 8192 \
  --hidden-size 2048 \
  --ffn-hidden-size 11264 \
  --num-attention-heads 16 \
  --kv-channels 128 \
  --qk-layernorm \
  --multi-latent-attention \
  --kv-lora-rank 512 \
  --qk-head-dim 128 \
  --qk-pos-emb-head-dim 64 \
  --v-head-dim 128 \
  --max-position-embeddings 8192 \
  --position-embedding-type rope \
  --rotary-base 50000 \
  --rotary-percent 1.0 \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --swiglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 163840 \
  --make-vocab-size-divisible-by 128 \
  --num-experts 64 \
  --moe-layer-freq '([0]*1+[1]*26)' \
  --moe-ffn-hidden-size 1408 \
  --moe-router-topk 6 \
  --moe-shared-expert-intermediate-size 2816 \
  --moe-router-enable-expert-bias \
  --moe-router-score-function sigmoid \
  --padded-vocab-size 163840 \
  --bf16 \
  --moe-router-topk-scaling-factor 2.446 \
  --global-batch-size 1024 \
  +nest=pinned nest.plan="$plan" "$@"
