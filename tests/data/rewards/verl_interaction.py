# ruff: noqa: UP045
# An interaction in the form of verl up to 0.8 (verl/interactions/gsm8k_interaction.py), as its users have written it.
import logging
import os
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class SumInteraction(BaseInteraction):
    """Has a state for each conversation, in the process."""

    def __init__(self, config: dict):
        super().__init__(config)
        self._instance_dict = {}

    async def start_interaction(
        self, instance_id: Optional[str] = None, ground_truth: Optional[str] = None, **kwargs
    ) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instance_dict[instance_id] = {"ground_truth": ground_truth, "responses": []}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        content = ""
        for i in range(len(messages) - 1, -1, -1):
            item = messages[i]
            if item.get("role") == "assistant":
                content = item.get("content")
                break

        instance = self._instance_dict[instance_id]
        instance["responses"].append(content)
        reward = await self.calculate_score(instance_id)
        extra = {"answers": instance["responses"], "level": kwargs.get("level", "easy")}
        if reward == 1.0:
            return True, self.config.get("right", "That is right."), 1.0, extra
        tries = len(instance["responses"])
        return False, f"That is wrong. You have had {tries} {'try' if tries == 1 else 'tries'}.", 0.0, extra

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        instance = self._instance_dict[instance_id]
        return float(instance["responses"][-1] == instance["ground_truth"])

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instance_dict[instance_id]
