# GPT 125M (GPT-3 Small) on 2 nodes of 8 GPUs;
# sizes, batch and learning rate as in the GPT-3 paper (arXiv 2005.14165, table 2.1).
#
#   source configs/megatron/gpt-125m.sh
#   megatron-ft run --nodes "$NODES" --ranks-per-node "$GPUS_PER_NODE" --spares 1 -- \
#       python pretrain_gpt.py "${MEGATRON_ARGS[@]}" --tokenizer-type ... --data-path ...
#
# Either node may be lost (xor:2).  Host memory for snapshots:
# 12 B x 125.3e6 parameters / 2 nodes x 2 slots x (1 + 1/1) = 2.8 GiB a node.
# Nothing in this file was tuned or timed on such machines.

NODES=2
GPUS_PER_NODE=8
: "${PROTECT:=xor:2}"
# Before Blackwell, overlapped communication needs one queue to the device.
export CUDA_DEVICE_MAX_CONNECTIONS=1

source "$(dirname "${BASH_SOURCE[0]}")/storage.sh"

MODEL_ARGS=(
    --num-layers 12
    --hidden-size 768
    --num-attention-heads 12
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 50257
    --position-embedding-type learned_absolute
    --attention-dropout 0.1
    --hidden-dropout 0.1
    --init-method-std 0.02
)

# 0.5 million tokens an iteration, 0.3 trillion in all.
TRAINING_ARGS=(
    --micro-batch-size 16
    --global-batch-size 256
    --train-iters 572204
    --lr 6.0e-4
    --min-lr 6.0e-5
    --lr-decay-style cosine
    --lr-warmup-iters 715
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --clip-grad 1.0
    --bf16
    --log-interval 10
)

# Data-parallel size 16.
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --use-distributed-optimizer
    --overlap-grad-reduce
    --overlap-param-gather
)

SNAPSHOT_ARGS=(
    --inmem-snapshot
    --inmem-snapshot-interval 20
    --inmem-protect "$PROTECT"
)

MEGATRON_ARGS=(
    "${MODEL_ARGS[@]}"
    "${TRAINING_ARGS[@]}"
    "${PARALLEL_ARGS[@]}"
    "${SNAPSHOT_ARGS[@]}"
    "${STORAGE_ARGS[@]}"
)
