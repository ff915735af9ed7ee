#!/usr/bin/env bash
# bert_large with its pinned plan: 16 GPUs of dgx_h100, 16 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash bert_large.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 2" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 4" ;;
  *) echo "usage: bash bert_large.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/bert_large_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} examples/bert/pretrain_bert.py \
  --num-layers 24 \
  --seq-length 512 \
  --hidden-size 1024 \
  --ffn-hidden-size 4096 \
  --num-attention-heads 16 \
  --max-position-embeddings 512 \
  --position-embedding-type learned_absolute \
  --normalization LayerNorm \
  --norm-epsilon 1e-12 \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --vocab-size 30522 \
  --make-vocab-size-divisible-by 128 \
  --padded-vocab-size 30592 \
  --bf16 \
  --global-batch-size 2048 \
  +nest=pinned nest.plan="$plan" "$@"
