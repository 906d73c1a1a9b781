"""Calls functions as verl, TRL and OpenRLHF do, for a recorded conversation. Runs where these packages are installed.

Takes the recording and the functions as JSON on stdin. Each function writes down its own arguments. The packages' own
code builds them: verl's reward manager, TRL's generation with tools and its rewards, OpenRLHF's executor.
"""

import asyncio
import importlib
import json
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any


def call_verl(record: dict[str, Any], tokenizer: Any, function: Any) -> None:
    torch, numpy, verl = (importlib.import_module(name) for name in ("torch", "numpy", "verl"))
    manager = importlib.import_module("verl.experimental.reward_loop.reward_manager.naive").NaiveRewardManager
    row, ids = record["rows"]["verl"], record["response_ids"]
    values = {
        "data_source": row["data_source"],
        "reward_model": row["reward_model"],
        "extra_info": row["extra_info"],
        "__num_turns__": record["num_turns"],
        "tool_extra_fields": {"turn_scores": [], "tool_rewards": []},
    }
    columns = {name: numpy.empty(1, dtype=object) for name in values}
    for name, value in values.items():
        columns[name][0] = value
    batch = {"responses": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids) + 1, dtype=torch.long)}

    async def run() -> None:
        made = manager(SimpleNamespace(), tokenizer, function)
        made.loop = asyncio.get_running_loop()
        await made.run_single(verl.DataProto.from_dict(tensors=batch, non_tensors=columns))

    asyncio.run(run())


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: A number.
        b: A number.
    """
    return a + b


def call_trl(record: dict[str, Any], tokenizer: Any, function: Any) -> None:
    trl = importlib.import_module("trl.trainer.grpo_trainer")
    templates = importlib.import_module("trl.chat_template_utils")
    tokenizer.response_template = templates.qwen3_template
    turns, loop = [*record["turns"]], asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    trainer = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    model = SimpleNamespace(training=True, config=SimpleNamespace(max_position_embeddings=1 << 20))
    trainer.__dict__ |= {
        "accelerator": SimpleNamespace(device="cpu", gather=lambda value: value, is_main_process=False),
        "args": SimpleNamespace(report_to=[]),
        "model": model,
        "state": SimpleNamespace(num_input_tokens_seen=0, global_step=1),
        "processing_class": tokenizer,
        "_tokenizer": tokenizer,
        "eos_token_ids": [tokenizer.eos_token_id],
        "tools": [add],
        "_sync_tool_dicts": [{"add": add}],
        "_async_tool_dicts": [{}],
        "max_tool_calling_iterations": 8,
        "max_completion_length": 1 << 20,
        "num_generations": 1,
        "chat_template": templates.qwen3_training_chat_template,  # as GRPOTrainer chooses it for Qwen3 with tools
        "chat_template_kwargs": {},
        "_metrics": defaultdict(lambda: defaultdict(list)),
        "reward_funcs": [function],
        "reward_processing_classes": [None],
        "reward_func_names": ["function"],
        "reward_weights": None,
        "async_loop": loop,
        "_generate_single_turn": lambda *_, **__: ([turns.pop(0)], None),
        **dict.fromkeys(("rollout_func", "environments", "environment_factories")),
        **dict.fromkeys(("_is_vlm", "use_vllm"), False),
    }
    row = record["rows"]["trl"]
    _, completion_ids, _, completions, *_ = trainer._generate([row["prompt"]])
    trainer._calculate_rewards([row], [row["prompt"]], completions, completion_ids)


def call_openrlhf(record: dict[str, Any], tokenizer: Any, function: Any) -> None:
    made = importlib.import_module("openrlhf.utils.agent").SingleTurnAgentExecutor()
    made.reward_endpoints, made.reward_func = ["function.py"], function

    async def generate(*_: Any, **__: Any) -> Any:
        output = SimpleNamespace(token_ids=record["response_ids"], finish_reason="stop", logprobs=None, text="")
        return SimpleNamespace(outputs=[output])

    sampling = SimpleNamespace(max_tokens=1024, logprobs=None)
    engine, label = SimpleNamespace(generate=generate), record["rows"]["openrlhf"]["answer"]
    asyncio.run(made.execute(record["prompt_text"], label, sampling, 1 << 20, tokenizer, engine))


CALLS = {"verl": call_verl, "trl": call_trl, "openrlhf": call_openrlhf}


def main() -> None:
    record = json.load(sys.stdin)
    transformers = importlib.import_module("transformers")
    for project, source, entrypoint in record["functions"]:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(record["tokenizer"])
        names: dict[str, Any] = {}
        exec(source, names)
        CALLS[project](record, tokenizer, names[entrypoint])


main()
