"""The static checks of a reward: a function's source, a judge's parser. Executes nothing."""

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from rljob_api.functions.static_check import check_function
from rljob_api.manifest.reward import FunctionReward, Reward, Scope
from rljob_api.manifest.scorers import JudgeReward, find_judge_problems
from rljob_cli.check.jobfile import Finding
from rljob_cli.local.secrets import find_reference


def check_reward(reward: Reward, path: str) -> Iterator[Finding]:
    """Check a function's source, or a judge's parser, without executing it."""
    if reward.judge is not None:
        yield from _check_judge(reward, reward.judge, f"{path}.judge")
    if reward.function is not None:
        yield from _check_function(reward.function, reward.scope, f"{path}.function")


def _check_judge(reward: Reward, judge: JudgeReward, path: str) -> Iterator[Finding]:
    for name, problem in find_judge_problems(judge):
        yield Finding(f"{path}.{name}", problem)
    reference = find_reference(reward)
    if reference and not os.environ.get(reference.key):
        problem = f"refers to a cluster's Secret, which ${reference.key} replaces on this machine; set that variable"
        yield Finding(f"{path}.endpoint.apiKeySecretRef.key", problem, only="local")


def _check_function(function: FunctionReward, scope: Scope, path: str) -> Iterator[Finding]:
    if function.inline is not None:
        name = f"{path}.inline"
        for problem in check_function(function.inline, name, function, scope):
            line, _, message = problem.removeprefix(f"{name}:").partition(": ")
            yield Finding(name, f"line {line}: {message}", line_within=int(line) if line.isdigit() else 0)
    elif function.config_map_key_ref is not None:
        reference = function.config_map_key_ref
        message = (
            f"names the ConfigMap {reference.name}, which is not in this file; add it after ---, or use function.file"
        )
        yield Finding(f"{path}.configMapKeyRef", message, only="local")
    elif function.file is not None:
        yield from (Finding(f"{path}.file", problem) for problem in _check_source(Path(function.file), function, scope))


def _check_source(file: Path, function: FunctionReward, scope: Scope) -> list[str]:
    if not file.exists():
        return [f"file {file} not found{_near_file(file)}"]
    if not file.is_file():
        return [f"{file} must be a Python file, got a folder"]
    try:
        return check_function(file.read_text(encoding="utf-8-sig"), str(file), function, scope)
    except OSError as error:
        return [f"{file} cannot be read: {error.strerror}"]
    except UnicodeDecodeError as error:
        return [f"{file} is not UTF-8 text (byte {error.start}); a reward is Python source"]


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" (folder {path.parent} not found either)"
    near = difflib.get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f"; did you mean {near[0]}?" if near else ""
