"""The limits that decide what the trainer keeps in memory. The trainer applies them, and the plan assumes them."""

from dataclasses import dataclass

GATHERED_SHARE_OF_DEVICE_MEMORY = 0.25
"""Parameters up to this share of a GPU's memory stay gathered from the first forward to the last backward."""
GRADIENT_SHARE_OF_DEVICE_MEMORY = 0.05
"""Gradients up to this share of a GPU's memory add up unsharded over the micro-batches of a call, and are reduced once.
Larger ones are reduced after every micro-batch."""
UPDATE_SHARE_OF_DEVICE_MEMORY = 0.9
"""What an update may need of a GPU's memory by the plan, before more activations are computed again. The rest is for
what the plan does not know: fragmentation, workspaces of kernels, and what the compiler keeps."""
GRADIENT_BYTES = 4
"""Gradients are accumulated and reduced in fp32."""
MICRO_BATCH_TOKENS = (16384, 8192, 4096)
"""trainer.microBatchTokens where the job leaves it open: the first one, or on GPUs a smaller one, with which layers
need not be computed again as a whole. Matrix products of fewer tokens are slower than those saved."""
LOGITS_BLOCK_BYTES = 256 << 20
"""Logits are computed in blocks of the vocabulary of this size. Those of a single block are kept for the backward pass;
larger ones where a GPU has room for all."""
BLOCK_ROWS = 64
"""Targets of a block of fp32 arithmetic: they fit a CPU's cache for vocabularies of 32,000 to 150,000."""
DEVICE_BLOCK_BYTES = 32 << 20
"""Size of a block of fp32 arithmetic on a GPU, without compilation: its second level cache has 40 MB or more."""
HEAD_BLOCK_ROWS = 4096
"""Rows of the head that a CPU converts at once for a product in fp32."""
OBJECT_STORE_BYTES = 100_000_000
"""Size of a Ray node, at least (see object_store.py). Rows pass through it, weights do not. Ray's default is 30% of the
memory."""
ROW_BYTES_PER_TOKEN = 29
"""What a rank gets of a sampled token, with all optional values but those of teachers (policy.layout.RankRows)."""
NUM_KEPT_VERSIONS = 2
"""Weight files that the publisher keeps, so that a rollout can finish downloading the previous version."""


_COLUMNS_MULTIPLE = 64
"""Matrix products of other widths are slower."""


def count_block_columns(num_tokens: int, vocabulary: int, bytes_per_logit: int) -> int:
    """Return the width of a block of logits: all of the vocabulary, if it is small."""
    columns = LOGITS_BLOCK_BYTES // (max(1, num_tokens) * bytes_per_logit)
    return min(vocabulary, max(1, columns // _COLUMNS_MULTIPLE) * _COLUMNS_MULTIPLE)


def count_block_rows(columns: int, *, on_cpu: bool) -> int:
    """Return the targets of a block of fp32 arithmetic."""
    return BLOCK_ROWS if on_cpu else max(1, DEVICE_BLOCK_BYTES // (4 * columns))


@dataclass(frozen=True)
class ShardingMode:
    keep_gathered: bool
    """Whether the parameters stay gathered between the passes of an update."""
    reduce_once: bool
    """Whether a call reduces its gradients once, after the last backward. Until then a rank holds all gradients."""


def choose_sharding(num_trained: int, num_frozen: int, bytes_per_parameter: int, device_bytes: int) -> ShardingMode:
    """Return the fastest mode for which a GPU with `device_bytes` has memory."""
    gathered = (num_trained + num_frozen) * bytes_per_parameter
    return ShardingMode(
        keep_gathered=gathered <= GATHERED_SHARE_OF_DEVICE_MEMORY * device_bytes,
        reduce_once=num_trained * GRADIENT_BYTES <= GRADIENT_SHARE_OF_DEVICE_MEMORY * device_bytes,
    )
