#!/usr/bin/env bash
# mamba2_hybrid_8b with its pinned plan: 32 GPUs of dgx_h100, 32 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash mamba2_hybrid_8b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 4" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 8" ;;
  *) echo "usage: bash mamba2_hybrid_8b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/mamba2_hybrid_8b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_hybrid.py \
  --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec \
  --seq-length 4096 \
  --mamba-state-dim 128 \
  --mamba-head-dim 64 \
  --mamba-num-groups 8 \
  --hidden-size 4096 \
  --ffn-hidden-size 16384 \
  --num-attention-heads 32 \
  --group-query-attention \
  --num-query-groups 8 \
  --max-position-embeddings 4096 \
  --position-embedding-type none \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --squared-relu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 256000 \
  --make-vocab-size-divisible-by 128 \
  --hybrid-layer-pattern 'M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-' \
  --padded-vocab-size 256000 \
  --bf16 \
  --global-batch-size 512 \
  +nest=pinned nest.plan="$plan" "$@"
