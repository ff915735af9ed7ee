#!/usr/bin/env bash
# nemotron_h_56b with its pinned plan: 128 GPUs of dgx_h100, 128 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash nemotron_h_56b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 16" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 32" ;;
  *) echo "usage: bash nemotron_h_56b.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/nemotron_h_56b_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_hybrid.py \
  --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec \
  --seq-length 8192 \
  --mamba-state-dim 256 \
  --mamba-head-dim 64 \
  --mamba-num-groups 8 \
  --mamba-num-heads 256 \
  --hidden-size 8192 \
  --ffn-hidden-size 32768 \
  --num-attention-heads 64 \
  --group-query-attention \
  --num-query-groups 8 \
  --max-position-embeddings 8192 \
  --position-embedding-type none \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --squared-relu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 131072 \
  --make-vocab-size-divisible-by 128 \
  --hybrid-layer-pattern 'M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-' \
  --padded-vocab-size 131072 \
  --bf16 \
  --global-batch-size 1024 \
  +nest=pinned nest.plan="$plan" "$@"
