#!/usr/bin/env bash
# Llama-3 70B with Megatron-LM's own script, TP 8 and PP 8; what follows goes behind its flags.
#   MEGATRON_LM_HOME=CHECKOUT bash docs/samples/llama3_70b.sh +nest=auto nest.dry_run=true ...
set -euo pipefail
cd "$MEGATRON_LM_HOME"
exec python pretrain_gpt.py \
  --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 \
  --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --swiglu \
  --disable-bias-linear --untie-embeddings-and-output-weights \
  --attention-dropout 0.0 --hidden-dropout 0.0 \
  --tokenizer-type NullTokenizer --vocab-size 128256 --make-vocab-size-divisible-by 128 \
  --mock-data --bf16 --use-flash-attn \
  --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel \
  --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
  --micro-batch-size 1 --global-batch-size 4096 \
  --train-iters 100 --lr 1.5e-4 "$@"
