"""What the fork server of rank_programs imports once: every program of ranks has it from there.

No import starts a thread that a fork would lose, and no collective exists yet.
"""

from __future__ import annotations

import gc

import peft  # noqa: F401
from transformers import AutoModelForCausalLM, Glm4MoeForCausalLM, LlamaForCausalLM, Qwen3ForCausalLM  # noqa: F401

from tests.support import (  # noqa: F401
    checkpoint_scenarios,
    critic_scenarios,
    export_scenarios,
    loading_scenarios,
    lora_scenarios,
    offload_scenarios,
    policy_scenarios,
    shared_memory_scenarios,
    turn_scenarios,
)

# Collections in the forked processes would traverse, and so copy, all that is imported.
gc.collect()
gc.freeze()
