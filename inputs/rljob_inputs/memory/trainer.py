"""The memory of one trainer rank, at each moment of an update. Pure.

Follows rljob_trainer.policy: each function names the module that allocates what it counts. All sizes are bytes of one
rank. `make bench-plan` compares them with torch's memory tracker on the real policy.
"""

from dataclasses import dataclass
from typing import Literal

from rljob_inputs.memory import limits
from rljob_inputs.memory.limits import ShardingMode
from rljob_inputs.memory.parts import Moment, Part, build_moment
from rljob_inputs.memory.shapes import Shape

Recomputation = Literal["none", "selective", "full"]
"""What the backward pass computes again (policy.recomputation), from the most memory to the least."""
GRADIENTS = "gradients"
"""The part that is held in an update alone."""
_FP32 = 4
_ADAMW_BYTES = 8
"""Two fp32 moments per parameter."""


@dataclass(frozen=True)
class Work:
    """What one rank computes."""

    shape: Shape
    num_shards: int
    """Ranks that share the state."""
    bytes_per_value: int
    """Width of the compute dtype."""
    bytes_per_logit: int
    """Width of trainer.headDtype."""
    limits_logits: bool
    """Whether the model limits its logits softly, as Gemma does: its derivative is one more fp32 block."""
    tokens: int
    """Tokens of the largest micro-batch, with padding."""
    line_tokens: int
    """Tokens of its longest line."""
    on_gpu: bool
    mode: ShardingMode
    recomputation: Recomputation = "none"
    kept_logits_bytes: int = limits.LOGITS_BLOCK_BYTES
    """Logits of at most this size are kept for the backward pass."""
    attention: str = "sdpa"
    has_masks: bool = False
    """Whether rows share prompts (trees), which needs dense masks and repeats keys and values for each head."""
    key_copies: float = 1
    """Keys that attention reads per computed token; above 1 where packed rows share prompts."""
    adapter_parameters: int = 0
    """0: all weights are trained."""
    has_reference: bool = False
    """Whether there is a second, frozen model. With adapters there is none."""
    has_critic: bool = False
    offloads_state: bool = False
    """Whether state, gradients and critic are on the host (trainer.offload: all)."""
    offloads_reference: bool = False

    @property
    def has_adapters(self) -> bool:
        return self.adapter_parameters > 0

    @property
    def num_trained(self) -> int:
        return self.adapter_parameters or self.shape.num_parameters

    @property
    def all_logits_bytes(self) -> int:
        return self.tokens * self.shape.vocabulary * self.bytes_per_logit


def count_for_sharding(
    shape: Shape, adapter_parameters: int, *, has_reference: bool, has_critic: bool
) -> tuple[int, int]:
    """Return the numbers of trained and frozen parameters, as Policy counts them for its sharding mode."""
    trained = adapter_parameters or shape.num_parameters
    frozen = shape.num_parameters if adapter_parameters or has_reference else 0
    return trained + shape.num_parameters * has_critic, frozen


def plan_rank(work: Work) -> tuple[Moment, ...]:
    """Return what a rank holds on its device in its update, and while it scores tokens with the reference model."""
    held = [
        *_list_kept(work, 0),
        Part("critic", critic_bytes(work), is_certain=True),
        Part("gathered weights", gathered_bytes(work), is_certain=True),
    ]
    logits, backward = logits_bytes(work), layer_backward_bytes(work)
    update = [
        *held,
        Part(GRADIENTS, gradient_bytes(work), is_certain=True),
        Part("activations", activation_bytes(work)),
        Part("logits", logits),
        # The head's backward pass and the layers' are one after the other.
        Part("backward pass", max(0, backward - logits)),
    ]
    moments = [build_moment("update", update)]
    if work.has_reference:
        gathered = gathered_bytes(work)
        scoring = [*held, Part("gathered reference", gathered, True), Part("logits", logits_forward_bytes(work))]
        moments.append(build_moment("reference", scoring))
    return tuple(moments)


def plan_offloaded(work: Work) -> tuple[Part, ...]:
    """Return what a rank with a GPU holds on the host because of trainer.offload (policy.sharding)."""
    gradients = Part(GRADIENTS, gradient_shard_bytes(work), is_certain=True)
    return (*_list_kept(work, critic_shard_bytes(work), on_host=True), *([gradients] if work.offloads_state else []))


def plan_publish(work: Work, *, is_adapter: bool) -> Moment:
    """Return what a rank holds on its device while it publishes (Policy.stream_published), between two updates: there
    are no gradients. `is_adapter`: the adapters alone are gathered."""
    return build_moment(
        "publish",
        [
            *_list_kept(work, _critic_state_bytes(work)),
            Part("gathered weights", published_gathered_bytes(work, is_adapter=is_adapter), is_certain=True),
            Part("digest", 0 if is_adapter else digest_bytes(work), is_certain=True),
        ],
    )


def plan_freed(work: Work) -> tuple[Part, ...]:
    """Return what a rank keeps in pinned host memory while the rollouts have its device (Policy.free): all that it
    holds between two updates, unless trainer.offload has it there anyway."""
    return tuple(_list_kept(work, _critic_state_bytes(work), prefix="pinned "))


def _list_kept(work: Work, critic: int, *, on_host: bool = False, prefix: str = "") -> list[Part]:
    """Return what a rank keeps between two updates, as far as trainer.offload has it on the host, or on the device."""
    kept = (
        ("state", state_bytes(work), work.offloads_state),
        ("reference", reference_bytes(work), work.offloads_reference),
        ("critic", critic, work.offloads_state),
    )
    return [Part(f"{prefix}{name}", size, True) for name, size, is_moved in kept if size and is_moved is on_host]


def published_gathered_bytes(work: Work, *, is_adapter: bool) -> int:
    """What is gathered at once: the adapters in fp32; or also all parameters, if they stay gathered; or one by one: the
    embeddings are the largest, and their shard is converted first (sharding.gather)."""
    adapters = work.adapter_parameters * _FP32
    if is_adapter:
        return adapters
    if work.mode.keep_gathered:
        return adapters + gathered_bytes(work)
    largest = work.shape.embedding_parameters * work.bytes_per_value
    return adapters + largest + _shard(work, largest)


def digest_bytes(work: Work) -> int:
    """The digest of the largest parameter (weights.checksum): it halves the units, and halves them again."""
    return work.shape.embedding_parameters * work.bytes_per_value * 3 // 4


def reference_bytes(work: Work) -> int:
    """The frozen weights of the reference model, in the compute dtype."""
    return _shard(work, work.shape.num_parameters * work.bytes_per_value) * work.has_reference


def state_bytes(work: Work) -> int:
    """Weights and AdamW's moments: fp32 shards (policy.optimizer). With adapters, only these have moments, and the
    model's own weights have the compute dtype (policy.lora)."""
    per_parameter = _FP32 + _ADAMW_BYTES
    if work.has_adapters:
        own = work.shape.num_parameters * work.bytes_per_value
        return _shard(work, work.adapter_parameters * per_parameter + own)
    return _shard(work, work.shape.num_parameters * per_parameter)


def critic_bytes(work: Work) -> int:
    """The critic of ppo is trained whole, whatever the policy trains (policy.critic): weights, moments and gradient of
    a decoder, and what is gathered. Its activations come after the policy's, and are at most as large."""
    if not work.has_critic:
        return 0
    gathered = work.shape.decoder_parameters * work.bytes_per_value if work.mode.keep_gathered else 0
    return critic_shard_bytes(work) * (not work.offloads_state) + gathered


def _critic_state_bytes(work: Work) -> int:
    """The critic's weights and moments, between two updates."""
    return _shard(work, work.shape.decoder_parameters * (_FP32 + _ADAMW_BYTES)) * work.has_critic


def critic_shard_bytes(work: Work) -> int:
    """The critic's weights, moments and gradients."""
    bytes_per_parameter = _FP32 + _ADAMW_BYTES + limits.GRADIENT_BYTES
    return _shard(work, work.shape.decoder_parameters * bytes_per_parameter) * work.has_critic


def gathered_bytes(work: Work) -> int:
    """Parameters in the compute dtype that FSDP2 has gathered (policy.sharding): all, or those outside of the layers
    (which are never resharded within a pass) and the last layer's, whose buffer it keeps until the next one."""
    shape = work.shape
    if work.mode.keep_gathered:
        return (shape.num_parameters + work.adapter_parameters) * work.bytes_per_value
    return (shape.root_parameters + shape.layer_parameters) * work.bytes_per_value


def gradient_bytes(work: Work) -> int:
    """fp32 gradients of what is trained. They are sharded between the calls of an update (policy.sharding). Within a
    call they are reduced after every micro-batch, or add up whole on each rank. FSDP2 keeps the buffer of the last
    reduction, which is that of the root unit, into the next micro-batch."""
    sharded = gradient_shard_bytes(work) * (not work.offloads_state)
    if work.mode.reduce_once:
        return sharded + work.num_trained * limits.GRADIENT_BYTES
    is_reduced = work.num_shards > 1 and not work.has_adapters
    return sharded + is_reduced * work.shape.root_parameters * limits.GRADIENT_BYTES


def gradient_shard_bytes(work: Work) -> int:
    return _shard(work, work.num_trained * limits.GRADIENT_BYTES)


def activation_bytes(work: Work) -> int:
    """What the forward pass keeps for the backward pass: of each layer, as recomputation says. The final norm is
    outside of the layers; so are the hidden states of the targets."""
    return work.tokens * (work.shape.num_layers * kept_layer_bytes(work) + _norm_bytes(work)) + mask_bytes(work)


def kept_layer_bytes(work: Work) -> int:
    """What is kept of one token in one decoder layer until its backward pass: at least the layer's input."""
    if work.recomputation == "none":
        return layer_bytes(work)
    return work.bytes_per_value * work.shape.hidden + _product_bytes(work)


def _product_bytes(work: Work) -> int:
    """The results of a layer's matrix products and of its attention, which selective keeps, without those of
    adapters."""
    if work.recomputation != "selective":
        return 0
    shape = work.shape
    experts = (shape.experts_per_token or 1) * (2 * shape.intermediate + shape.hidden) + shape.num_experts
    width = 2 * (shape.query + shape.key) + shape.hidden + experts
    return work.bytes_per_value * width + _FP32 * shape.num_heads


def layer_bytes(work: Work) -> int:
    """What autograd saves of one token in one decoder layer of transformers.

    norm (twice): its fp32 input, the normalized values and the result. attention: queries, keys, values and output, and
    the log-sum-exp of each head. MLP: gate, its activation, up, and their product."""
    shape, size = work.shape, work.bytes_per_value
    keys = shape.query if work.has_masks else int(shape.key * work.key_copies)
    attention = size * 2 * (shape.query + keys) + _FP32 * shape.num_heads
    if shape.has_head_norm:
        attention += (_FP32 + size) * (shape.query + shape.key)
    if work.attention == "eager":  # the weights of each pair of tokens, in fp32 and in the compute dtype
        attention += shape.num_heads * work.line_tokens * (_FP32 + size)
    mlp = 4 * size * shape.intermediate
    if shape.num_experts:  # each chosen expert also keeps a copy of its input and its output
        mlp = shape.experts_per_token * (mlp + 2 * size * shape.hidden)
    return 2 * _norm_bytes(work) + attention + mlp


def mask_bytes(work: Work) -> int:
    """The dense mask of lines with trees, in the compute dtype (policy.attention)."""
    return work.tokens * work.line_tokens * work.bytes_per_value if work.has_masks else 0


def logits_bytes(work: Work) -> int:
    """The head's backward pass (policy.selected_logprobs): a block of logits, or all that were kept, and the blocks of
    fp32 arithmetic. A trained head has a gradient of its weights. The gradients of the hidden states add up in fp32
    over the blocks; the only one needs no sum. For the products, the gradient of wider logits is narrowed."""
    shape, size = work.shape, work.bytes_per_value
    block, rows = _logits_block(work)
    logits = work.all_logits_bytes if work.all_logits_bytes <= work.kept_logits_bytes else block
    weights = 0 if work.has_adapters else shape.embedding_parameters * size
    narrowed = 0 if work.bytes_per_logit == size else block // work.bytes_per_logit * size
    hidden = work.tokens * shape.hidden
    if block >= work.all_logits_bytes:
        return logits + weights + max((3 + work.limits_logits) * rows, narrowed + hidden * size)
    product = hidden * (_FP32 if work.on_gpu else size)
    return logits + weights + hidden * _FP32 + max((3 + work.limits_logits) * rows, narrowed + product)


def logits_forward_bytes(work: Work) -> int:
    """The head's forward pass: a block of logits and the blocks of fp32 arithmetic (policy.selected_logprobs)."""
    block, rows = _logits_block(work)
    return block + 3 * rows


def layer_backward_bytes(work: Work) -> int:
    """The backward pass within the MLP of the last layer, while the other layers' activations are still held, and those
    of the final norm no longer: the layer's own activations if they are computed again, the gradients of up, gate and
    output, those of the weights of the head and of `down`, and the next layer, which FSDP2 gathers ahead."""
    shape, size = work.shape, work.bytes_per_value
    recomputed = 0 if work.recomputation == "none" else max(0, layer_bytes(work) - _product_bytes(work))
    width = shape.intermediate * (shape.experts_per_token or 1)
    temporary = size * (2 * width + shape.hidden)
    down = (shape.num_experts or 1) * shape.hidden * shape.intermediate
    weights = 0 if work.has_adapters else shape.embedding_parameters + down
    ahead = 0 if work.mode.keep_gathered else shape.layer_parameters
    return work.tokens * (recomputed + temporary - _norm_bytes(work)) + size * (weights + ahead)


def _logits_block(work: Work) -> tuple[int, int]:
    """Return the bytes of a block of logits, and of one block of its fp32 arithmetic."""
    columns = limits.count_block_columns(work.tokens, work.shape.vocabulary, work.bytes_per_logit)
    rows = min(work.tokens, limits.count_block_rows(columns, on_cpu=not work.on_gpu))
    return work.tokens * columns * work.bytes_per_logit, rows * columns * _FP32


def _norm_bytes(work: Work) -> int:
    """What autograd saves of one token in an RMS norm and of the product that reads its result."""
    return (_FP32 + 2 * work.bytes_per_value) * work.shape.hidden


def _shard(work: Work, num_bytes: int) -> int:
    return -(-num_bytes // work.num_shards)
