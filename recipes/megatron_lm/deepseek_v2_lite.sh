#!/usr/bin/env bash
# deepseek_v2_lite with its pinned plan: 32 GPUs of dgx_h100, 32 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash deepseek_v2_lite.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 4" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 8" ;;
  *) echo "usage: bash deepseek_v2_lite.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/deepseek_v2_lite_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 27 \
  --seq-length 4096 \
  --hidden-size 2048 \
  --ffn-hidden-size 10944 \
  --num-attention-heads 16 \
  --kv-channels 128 \
  --qk-layernorm \
  --multi-latent-attention \
  --kv-lora-rank 512 \
  --qk-head-dim 128 \
  --qk-pos-emb-head-dim 64 \
  --v-head-dim 128 \
  --max-position-embeddings 163840 \
  --position-embedding-type rope \
  --rotary-base 10000 \
  --rotary-percent 1.0 \
  --normalization RMSNorm \
  --norm-epsilon 1e-06 \
  --swiglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 102400 \
  --make-vocab-size-divisible-by 128 \
  --num-experts 64 \
  --moe-layer-freq '([0]*1+[1]*26)' \
  --moe-ffn-hidden-size 1408 \
  --moe-router-topk 6 \
  --moe-shared-expert-intermediate-size 2816 \
  --padded-vocab-size 102400 \
  --bf16 \
  --moe-router-pre-softmax \
  --global-batch-size 512 \
  +nest=pinned nest.plan="$plan" "$@"
