"""Command lines of Megatron-LM's own example scripts (core_v0.16.1), variables expanded."""

from __future__ import annotations

LLAMA3_8B = """
CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 --nnodes 1 --node_rank 0
 --master_addr localhost --master_port 6000 pretrain_gpt.py
 --use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --kv-channels 128
 --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
 --rotary-base 1000000 --rotary-percent 1.0 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
 --init-method-std 0.0134 --attention-backend fused --apply-layernorm-1p
 --untie-embeddings-and-output-weights --disable-bias-linear
 --micro-batch-size 1 --global-batch-size 128 --train-samples 1953125000
 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252 --lr 0.00015 --min-lr 0.00001
 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine --clip-grad 1.0
 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
 --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc
 --empty-unused-memory-level 1 --exit-duration-in-mins 235 --use-distributed-optimizer
 --overlap-grad-reduce --overlap-param-gather --fp8-format hybrid --fp8-amax-history-len 1024
 --fp8-amax-compute-algo max --fp8-param-gather --tensor-model-parallel-size 1
 --context-parallel-size 1 --sequence-parallel --mock-data --tokenizer-type NullTokenizer
 --vocab-size 128256 --data-cache-path /tmp/cache --tiktoken-pattern v2 --split '99,1,0'
 --no-create-attention-mask-in-dataloader --no-mmap-bin-files --num-workers 1 --log-interval 1
 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput --ckpt-format torch_dist
 --distributed-timeout-minutes 60 --save /ckpt --load /ckpt --tensorboard-dir /tb
"""

MIXTRAL = """
torchrun --nproc_per_node 8 --nnodes 4 --node_rank 0 --master_addr node0 --master_port 6000
 pretrain_gpt.py --use-mcore-models --disable-bias-linear --seq-length 4096
 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
 --num-attention-heads 32 --init-method-std 0.01 --attention-dropout 0.0 --hidden-dropout 0.0
 --normalization RMSNorm --position-embedding-type rope --swiglu
 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 8
 --no-masked-softmax-fusion --no-position-embedding --rotary-base 1000000
 --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
 --overlap-param-gather --overlap-grad-reduce --tokenizer-type Llama2Tokenizer
 --tokenizer-model /tok --data-path /data --split 99990,8,2 --micro-batch-size 1
 --global-batch-size 256 --lr 1e-4 --train-iters 500000 --lr-decay-iters 320000
 --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 0.1 --lr-warmup-iters 500 --clip-grad 1.0
 --bf16 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4
 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel --log-interval 1
 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save /ckpt --load /ckpt
 --no-load-optim --no-load-rng
"""

GPT3_175B = """
torchrun --nproc_per_node 8 --nnodes 16 --master_addr node0 --master_port 6000 pretrain_gpt.py
 --num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
 --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1
 --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 768000000
 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001
 --lr-decay-samples 660480000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
 --data-path /data --vocab-file /vocab --merge-file /merge --split 949,50,1 --log-interval 100
 --save-interval 10000 --eval-interval 1000 --save /ckpt --load /ckpt --eval-iters 10
"""

BERT_340M = """
torchrun --nproc_per_node 8 --nnodes 16 --master_addr node0 --master_port 6000 pretrain_bert.py
 --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 512
 --max-position-embeddings 512 --attention-backend auto --micro-batch-size 4
 --global-batch-size 32 --train-iters 1000000 --weight-decay 1e-2 --clip-grad 1.0 --fp16
 --lr 0.0001 --lr-decay-iters 990000 --lr-decay-style linear --min-lr 1.0e-5
 --lr-warmup-fraction .01 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
 --data-path /data --vocab-file /vocab --split 949,50,1 --log-interval 100 --save-interval 10000
 --eval-interval 1000 --save /ckpt --load /ckpt --eval-iters 10
"""

T5_220M = """
torchrun --nproc_per_node 8 --nnodes 1 pretrain_t5.py --encoder-num-layers 12
 --decoder-num-layers 6 --hidden-size 768 --num-attention-heads 12 --encoder-seq-length 512
 --decoder-seq-length 128 --max-position-embeddings 512 --tokenizer-type BertWordPieceCase
 --vocab-extra-ids 100 --micro-batch-size 4 --global-batch-size 32
"""
