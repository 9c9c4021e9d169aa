# 70B in the shape of Llama 2 on 64 nodes of 8 GPUs;
# sizes, batch and learning rate as in the Llama 2 paper (arXiv 2307.09288, section 2.2).
#
#   source configs/megatron/llama-70b.sh
#   megatron-ft run --nodes "$NODES" --ranks-per-node "$GPUS_PER_NODE" --spares 1 -- \
#       python pretrain_gpt.py "${MEGATRON_ARGS[@]}" --tokenizer-type ... --data-path ...
#
# Any two nodes of 8 may be lost at once (rs:6+2).  Host memory for snapshots:
# 12 B x 68.989e9 parameters / 64 nodes x 2 slots x (1 + 2/6) = 32.1 GiB a node.
# Nothing in this file was tuned or timed on such machines.

NODES=64
GPUS_PER_NODE=8
: "${PROTECT:=rs:6+2}"
# Before Blackwell, overlapped communication needs one queue to the device.
export CUDA_DEVICE_MAX_CONNECTIONS=1

source "$(dirname "${BASH_SOURCE[0]}")/storage.sh"

MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --num-attention-heads 64
    --seq-length 4096
    --max-position-embeddings 4096
    --vocab-size 32000
    --ffn-hidden-size 28672
    --group-query-attention
    --num-query-groups 8
    --position-embedding-type rope
    --rotary-base 10000
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --disable-bias-linear
    --untie-embeddings-and-output-weights
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --init-method-std 0.02
)

# 4.2 million tokens an iteration, 2.0 trillion in all.
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1024
    --train-iters 476837
    --lr 1.5e-4
    --min-lr 1.5e-5
    --lr-decay-style cosine
    --lr-warmup-iters 2000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --log-interval 10
)

# Data-parallel size 16.
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 5
    --sequence-parallel
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

SNAPSHOT_ARGS=(
    --inmem-snapshot
    --inmem-snapshot-interval 2
    --inmem-protect "$PROTECT"
)

MEGATRON_ARGS=(
    "${MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${PARALLEL_ARGS[@]}"
    "${SNAPSHOT_ARGS[@]}"
    "${STORAGE_ARGS[@]}"
)
