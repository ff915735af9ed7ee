#!/usr/bin/env bash
# t5_11b with its pinned plan: 64 GPUs of dgx_h100, 64 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash t5_11b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 8" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 16" ;;
  *) echo "usage: bash t5_11b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/t5_11b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} examples/t5/pretrain_t5.py \
  --encoder-num-layers 24 \
  --decoder-num-layers 24 \
  --encoder-seq-length 512 \
  --decoder-seq-length 128 \
  --hidden-size 4096 \
  --ffn-hidden-size 10240 \
  --num-attention-heads 64 \
  --kv-channels 64 \
  --max-position-embeddings 512 \
  --position-embedding-type learned_absolute \
  --normalization LayerNorm \
  --norm-epsilon 1e-05 \
  --hidden-dropout 0.1 \
  --attention-dropout 0.1 \
  --vocab-size 29098 \
  --make-vocab-size-divisible-by 128 \
  --padded-vocab-size 29184 \
  --bf16 \
  --global-batch-size 2048 \
  +nest=pinned nest.plan="$plan" "$@"
