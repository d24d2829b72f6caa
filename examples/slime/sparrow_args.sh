# Arguments for slime's train.py; `source` this and append one of the two arrays.

# slime starts the engines itself: needs this package in its environment, and SGLang 0.5.15.post1.
SPARROW_ARGS=(
    --sglang-attention-backend sparrow
    --sglang-sparrow-schedule qwen3-4b-0.86
    --use-tis
    --tis-clip 2.0
)

# The engines are `sparrow serve` of another environment, on hosts that share this folder.
SPARROW_EXTERNAL_ARGS=(
    --rollout-external-engine-addrs 127.0.0.1:10090
    --update-weight-mode full
    --update-weight-transport disk
    --update-weight-disk-dir /shared/weights
    --use-tis
    --tis-clip 2.0
)
