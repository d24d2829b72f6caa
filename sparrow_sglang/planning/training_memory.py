"""GPU memory of a trainer, estimated from shapes before anything is loaded.

In: a model's shapes and what a training run sets. Out: bytes by cause, and the peaks of an update
and of an adapter step. Imports neither torch nor SGLang.

The estimate counts the tensors that grow with the model or with a micro-batch. With gradient
checkpointing, each layer keeps its input per token for the backward pass, which recomputes one
layer at a time. That layer then holds what its MLP makes (gate, up, their product and its
activation) and attention's queries, keys, values and output, all of them in 16 bits and each with
its gradient, and its residual stream and norms in the dtype of the weights. Without checkpointing,
every layer is counted with all of this. The first gradients come when all inputs are held, the last
ones when none is left: the peak is the larger of the two ends. tests/unit/planning compares the
sums with peaks that PyTorch measured.
"""

from dataclasses import dataclass

from sparrow_sglang.planning.model_shape import ModelShape

_FP32 = 4
_COMPUTED = 2
_MLP_TENSORS = 4
_RESIDUAL_TENSORS = 6
_WITH_GRADIENT = 2


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes on the trainer's GPU.

    Attributes:
        weights: weights of the model, in its dtype.
        optimizer: AdamW's two moments, and fp32 weights where the model's have 16 bits.
        gradients: sums in fp32.
        saved: kept for the backward pass: each layer's input or, without gradient checkpointing,
            as much as `working` for each layer.
        working: one layer while it is recomputed, with its gradients.
        gathered: with several ranks, what is not sharded on each GPU: embeddings, vocabulary
            projection and their gradient, two layers, of which one is fetched ahead, and a layer's
            gradient.
    """

    weights: int
    optimizer: int
    gradients: int
    saved: int
    working: int
    gathered: int = 0

    @property
    def idle(self) -> int:
        """Bytes between two updates, while responses are sampled."""
        return self.weights + self.optimizer

    @property
    def update_peak(self) -> int:
        return self.idle + self.gathered + max(self.gradients, self.saved + self.working)

    @property
    def adapter_peak(self) -> int:
        """Peak of a DistillSparse step; the gradients of an adapter are small, and left out."""
        return self.idle + self.gathered + self.saved + self.working


def training_memory(
    shape: ModelShape,
    parameters: int,
    tokens: int,
    itemsize: int,
    *,
    gradient_checkpointing: bool = True,
    offload: bool = False,
    ranks: int = 1,
) -> TrainingMemory:
    """The memory of updates on micro-batches of `tokens` tokens.

    `parameters` are all weights, tied ones once, of `itemsize` bytes each. With `offload` the
    optimizer's state and the fp32 weights and gradients lie in the memory of the CPU. With several
    `ranks` this is the memory of one GPU; all hold equal shares of weights, state and gradients.
    """
    shard = -(-parameters // ranks)
    stored = 0 if itemsize == _FP32 and not offload else shard * _FP32
    projections = shape.vocab_size * shape.hidden_size + parameters - shape.parameters
    layer = (parameters - projections) // shape.num_layers
    gathered = 2 * itemsize * projections + (2 * itemsize + _FP32) * layer
    heads = 2 * (shape.num_q_heads + shape.num_kv_heads) * shape.head_dim
    computed = _MLP_TENSORS * shape.intermediate_size + heads
    working = tokens * (
        _WITH_GRADIENT * _COMPUTED * computed + _RESIDUAL_TENSORS * itemsize * shape.hidden_size
    )
    layer_input = tokens * shape.hidden_size * itemsize
    return TrainingMemory(
        weights=shard * itemsize,
        optimizer=0 if offload else stored + 2 * shard * _FP32,
        gradients=0 if offload else shard * _FP32,
        saved=shape.num_layers * (layer_input if gradient_checkpointing else working),
        working=working,
        gathered=gathered if ranks > 1 else 0,
    )
