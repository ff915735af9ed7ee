#!/bin/bash
# A launch script as teams have it: docs/own_command.md asks about it.
TP=4
PP=2
torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --seq-length 8192 \
    --max-position-embeddings 8192 --swiglu --disable-bias-linear --normalization RMSNorm \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    --vocab-size 128256 --tokenizer-type NullTokenizer --bf16 \
    --micro-batch-size 1 --global-batch-size 128 --train-iters 10000 --lr 1e-4 \
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --sequence-parallel \
    --use-distributed-optimizer --save /checkpoints --save-interval 500 --our-own-flag 3
