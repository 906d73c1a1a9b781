"""The sizes of a tiny Qwen3 that a real vLLM serves, dense or with experts."""

TINY_QWEN3 = {
    "vocab_size": 2000,  # vLLM pads it to a multiple of 64
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "initializer_range": 0.1,
}
"""Fields of the configuration, without what differs between the two."""
