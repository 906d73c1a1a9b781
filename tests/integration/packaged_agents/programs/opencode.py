"""opencode. `opencode` is its program."""

import json
import os
import subprocess


def run(question, answer, base_url, api_key, opencode="opencode"):
    options = {"baseURL": base_url, "apiKey": api_key}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"policy": {}}}
    os.environ["OPENCODE_CONFIG_CONTENT"] = json.dumps({"provider": {"rljob": provider}})
    # With a title, it asks the model for none.
    command = [opencode, "run", "--title", "episode", "--model", "rljob/policy", question]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return float(answer in done.stdout)
