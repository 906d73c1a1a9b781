"""mini-swe-agent with its own prompts."""

from pathlib import Path

import minisweagent
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

PROMPTS = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())["agent"]


def run(question, answer):
    model = LitellmModel(model_name="openai/policy", cost_tracking="ignore_errors")
    prompts = {name: PROMPTS[name] for name in ("system_template", "instance_template")}
    result = DefaultAgent(model, LocalEnvironment(), **prompts).run(question)
    return float(answer in result["submission"])
