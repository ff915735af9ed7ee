#!/usr/bin/env bash
# nemotron3_nano with its pinned plan: 64 GPUs of dgx_h100, 64 GPUs of gb200_nvl72. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash nemotron3_nano.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM 0.19. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${1:-} in
  dgx_h100) hosts="--nproc-per-node 8 --nnodes 8" ;;
  gb200_nvl72) hosts="--nproc-per-node 4 --nnodes 16" ;;
  *) echo "usage: bash nemotron3_nano.sh dgx_h100|gb200_nvl72 <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/nemotron3_nano_$1.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun $hosts ${TORCHRUN_ARGS:-}} pretrain_hybrid.py \
  --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec \
  --seq-length 8192 \
  --mamba-state-dim 128 \
  --mamba-head-dim 64 \
  --mamba-num-groups 8 \
  --mamba-num-heads 64 \
  --hidden-size 2688 \
  --ffn-hidden-size 1856 \
  --num-attention-heads 32 \
  --group-query-attention \
  --num-query-groups 2 \
  --kv-channels 128 \
  --max-position-embeddings 262144 \
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
  --num-experts 128 \
  --moe-ffn-hidden-size 1856 \
  --moe-router-topk 6 \
  --moe-shared-expert-intermediate-size 3712 \
  --moe-router-enable-expert-bias \
  --moe-router-score-function sigmoid \
  --hybrid-layer-pattern 'MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME' \
  --padded-vocab-size 131072 \
  --bf16 \
  --moe-router-topk-scaling-factor 2.5 \
  --global-batch-size 1024 \
  +nest=pinned nest.plan="$plan" "$@"
