#!/usr/bin/env bash
# nemotron4_340b with its pinned plan: 512 GPUs of dgx_h100, 256 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash nemotron4_340b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 64" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 64" ;;
  *) echo "usage: bash nemotron4_340b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/nemotron4_340b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 96 \
  --seq-length 4096 \
  --hidden-size 18432 \
  --ffn-hidden-size 73728 \
  --num-attention-heads 96 \
  --group-query-attention \
  --num-query-groups 8 \
  --kv-channels 192 \
  --max-position-embeddings 4096 \
  --position-embedding-type rope \
  --rotary-base 10000 \
  --rotary-percent 0.5 \
  --normalization LayerNorm \
  --norm-epsilon 1e-05 \
  --apply-layernorm-1p \
  --squared-relu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 256000 \
  --make-vocab-size-divisible-by 128 \
  --padded-vocab-size 256000 \
  --bf16 \
  --global-batch-size 2304 \
  +nest=pinned nest.plan="$plan" "$@"
