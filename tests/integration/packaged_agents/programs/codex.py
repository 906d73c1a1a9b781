"""Codex CLI. `codex` is its program."""

import subprocess

SETTINGS = {
    "model": "policy",
    "model_provider": "rljob",
    "model_providers.rljob.name": "rljob",
    "model_providers.rljob.wire_api": "responses",
    "model_providers.rljob.env_key": "OPENAI_API_KEY",
}


def run(question, answer, base_url, codex="codex"):
    settings = SETTINGS | {"model_providers.rljob.base_url": base_url}
    options = [part for name, value in settings.items() for part in ("-c", f'{name}="{value}"')]
    # The runner's sandbox confines it.
    options += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    command = [codex, "exec", *options, question]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return float(answer in done.stdout)
