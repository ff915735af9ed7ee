#!/usr/bin/env bash
# mistral_nemo_12b on 64 GPUs with its pinned plan. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash mistral_nemo_12b.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# CLUSTER is dgx_h100 or b200. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=64
# behind your flags. Flags that change no shape (rotary or router scaling) are yours to add.
set -euo pipefail
plan=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/plans/mistral_nemo_12b_${1:?CLUSTER}.yaml
shift
cd "${MEGATRON_LM_HOME:?a checkout of Megatron-LM}"
exec ${LAUNCH:-torchrun --nproc-per-node 8 --nnodes 8 ${TORCHRUN_ARGS:-}} pretrain_gpt.py \
  --num-layers 40 \
  --seq-length 4096 \
  --hidden-size 5120 \
  --ffn-hidden-size 14336 \
  --num-attention-heads 32 \
  --group-query-attention \
  --num-query-groups 8 \
  --kv-channels 128 \
  --max-position-embeddings 131072 \
  --position-embedding-type rope \
  --rotary-base 1000000 \
  --rotary-percent 1.0 \
  --normalization RMSNorm \
  --norm-epsilon 1e-05 \
  --swiglu \
  --hidden-dropout 0.0 \
  --attention-dropout 0.0 \
  --disable-bias-linear \
  --untie-embeddings-and-output-weights \
  --vocab-size 131072 \
  --make-vocab-size-divisible-by 128 \
  --padded-vocab-size 131072 \
  --bf16 \
  --global-batch-size 1024 \
  +nest=pinned nest.plan="$plan" "$@"
