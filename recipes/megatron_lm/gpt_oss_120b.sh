#!/usr/bin/env bash
# gpt_oss_120b with its pinned plan: 64 GPUs of dgx_h100, 64 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash gpt_oss_120b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 8" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 16" ;;
  *) echo "usage: bash gpt_oss_120b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/gpt_oss_120b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 36 \
  --seq-length 4096 \
  --hidden-size 2880 \
  --ffn-hidden-size 2880 \
  --num-attention-heads 64 \
  --group-query-attention \
  --num-query-groups 8 \
  --kv-channels 64 \
  --softmax-type learnable \
  --window-size 127,0 \
  --window-attn-skip-freq 2 \
  --max-position-embeddings 131072 \
  --position-embedding-type rope \
  --rotary-base 150000 \
  --rotary-percent 1.0 \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --quick-geglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --untie-embeddings-and-output-weights \
  --vocab-size 201088 \
  --make-vocab-size-divisible-by 128 \
  --num-experts 128 \
  --moe-layer-freq 1 \
  --moe-ffn-hidden-size 2880 \
  --moe-router-topk 4 \
  --padded-vocab-size 201088 \
  --bf16 \
  --glu-linear-offset 1.0 \
  --activation-func-clamp-value 7.0 \
  --global-batch-size 1024 \
  +nest=pinned nest.plan="$plan" "$@"
