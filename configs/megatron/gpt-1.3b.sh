# GPT 1.3B (GPT-3 XL) on 4 nodes of 8 GPUs;
# sizes, batch and learning rate as in the GPT-3 paper (arXiv 2005.14165, table 2.1),
# with 16 heads of 128.
#
#   source configs/megatron/gpt-1.3b.sh
#   megatron-ft run --nodes "$NODES" --ranks-per-node "$GPUS_PER_NODE" --spares 1 -- \
#       python pretrain_gpt.py "${MEGATRON_ARGS[@]}" --tokenizer-type ... --data-path ...
#
# Any one node may be lost at once (rs:3+1).  Host memory for snapshots:
# 12 B x 1.316e9 parameters / 4 nodes x 2 slots x (1 + 1/3) = 9.8 GiB a node.
# Nothing in this file was tuned or timed on such machines.

NODES=4
GPUS_PER_NODE=8
: "${PROTECT:=rs:3+1}"
# Before Blackwell, overlapped communication needs one queue to the device.
export CUDA_DEVICE_MAX_CONNECTIONS=1

source "$(dirname "${BASH_SOURCE[0]}")/storage.sh"

MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 50257
    --position-embedding-type learned_absolute
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --init-method-std 0.02
)

# 1.0 million tokens an iteration, 0.3 trillion in all.
TRAINING_ARGS=(
    --micro-batch-size 8
    --global-batch-size 512
    --train-iters 286102
    --lr 2.0e-4
    --min-lr 2.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 358
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --log-interval 10
)

# Data-parallel size 32.
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

SNAPSHOT_ARGS=(
    --inmem-snapshot
    --inmem-snapshot-interval 10
    --inmem-protect "$PROTECT"
)

MEGATRON_ARGS=(
    "${MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${PARALLEL_ARGS[@]}"
    "${SNAPSHOT_ARGS[@]}"
    "${STORAGE_ARGS[@]}"
)
