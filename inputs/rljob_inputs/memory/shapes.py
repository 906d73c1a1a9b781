"""The shape of a decoder, from config.json: its parameters, and the sizes that its activations depend on. Pure.

Counts are exact for the families of `_EXACT` (a test compares them with transformers' modules). For others, what the
headers of the weights say takes the place of the count.
"""

from dataclasses import dataclass, replace

from rljob_inputs.models.architectures import text_config
from rljob_inputs.models.config import Config

_EXACT = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
"""Model types whose query, key and value projections always have a bias."""
_HEAD_NORM = ("qwen3", "qwen3_moe")
"""Model types that normalize each head of the queries and keys."""


@dataclass(frozen=True)
class Shape:
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Width of one MLP, or of one expert."""
    vocabulary: int
    is_tied: bool
    """Whether embeddings and head share their weights."""
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_head_norm: bool = False
    num_experts: int = 0
    """0: a dense model."""
    experts_per_token: int = 0
    known_parameters: int | None = None
    """The count of the weights' headers, for an architecture that is counted only approximately."""

    @property
    def query(self) -> int:
        """Width of the queries of all heads."""
        return self.num_heads * self.head_dim

    @property
    def key(self) -> int:
        """Width of the keys of all heads, which is also that of the values."""
        return self.num_kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embeddings, and equally of the head."""
        return self.vocabulary * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters in no layer: embeddings, final norm, and the head unless it is tied."""
        return self.embedding_parameters * (1 if self.is_tied else 2) + self.hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer."""
        if self.known_parameters is not None:
            return max(0, self.known_parameters - self.root_parameters) // self.num_layers
        attention = 2 * self.hidden * (self.query + self.key)
        attention += (self.query + 2 * self.key) * self.has_qkv_bias + self.hidden * self.has_output_bias
        attention += 2 * self.head_dim * self.has_head_norm
        mlp = 3 * self.hidden * self.intermediate
        if self.num_experts:
            mlp = self.num_experts * (mlp + self.hidden)  # each expert has a row of the router
        return attention + mlp + 2 * self.hidden

    @property
    def num_parameters(self) -> int:
        return self.root_parameters + self.num_layers * self.layer_parameters

    @property
    def decoder_parameters(self) -> int:
        """Without a separate head, as a critic has it."""
        return self.num_parameters - (0 if self.is_tied else self.embedding_parameters)

    def adapter_parameters(self, rank: int, targets: list[str]) -> int:
        """Return the parameters of LoRA's A and B. `targets`: names of modules; empty: all linear modules.

        The fused experts of a mixture have no adapter, but its attention has."""
        linear = {
            "q_proj": (self.hidden, self.query),
            "k_proj": (self.hidden, self.key),
            "v_proj": (self.hidden, self.key),
            "o_proj": (self.query, self.hidden),
        }
        if not self.num_experts:
            linear |= {
                "gate_proj": (self.hidden, self.intermediate),
                "up_proj": (self.hidden, self.intermediate),
                "down_proj": (self.intermediate, self.hidden),
            }
        widths = [sum(widths) for name, widths in linear.items() if not targets or name in targets]
        return self.num_layers * rank * sum(widths)


def read_shape(config: Config, known_parameters: int = 0) -> Shape | None:
    """Return the shape; None if config.json lacks a size. `known_parameters`: by the weights' headers; 0: unknown."""
    text = text_config(config)

    def size(*names: str) -> int:
        return next((value for name in names if isinstance(value := text.get(name), int) and value > 0), 0)

    hidden, layers = size("hidden_size", "n_embd", "d_model"), size("num_hidden_layers", "n_layer", "num_layers")
    heads, vocabulary = size("num_attention_heads", "n_head", "num_heads"), size("vocab_size")
    if not (hidden and layers and heads and vocabulary):
        return None
    model_type, experts = str(text.get("model_type")), size("num_experts", "num_local_experts", "n_routed_experts")
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    shape = Shape(
        hidden=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads") or heads,
        head_dim=size("head_dim") or hidden // heads,
        intermediate=(experts and size("moe_intermediate_size"))
        or size("intermediate_size", "n_inner", "ffn_dim")
        or 4 * hidden,
        vocabulary=vocabulary,
        # The default of every configuration of transformers 5 is false; older files were written with their own.
        is_tied=bool(tied),
        has_qkv_bias=model_type in _QKV_BIAS or bool(text.get("attention_bias")),
        has_output_bias=bool(text.get("attention_bias")) and model_type not in _QKV_BIAS,
        has_head_norm=model_type in _HEAD_NORM,
        num_experts=experts,
        experts_per_token=size("num_experts_per_tok", "moe_topk", "top_k") if experts else 0,
    )
    is_exact = model_type in _EXACT and not text.get("mlp_bias") and not text.get("mlp_only_layers")
    return shape if is_exact or not known_parameters else replace(shape, known_parameters=known_parameters)
