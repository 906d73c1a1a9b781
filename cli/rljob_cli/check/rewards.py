"""The checks of services that execute nothing: the syntax of a function's source, a judge's parser, a user's persona, a
runner's command. A call shows whether a function can be called (`trial`)."""

import os
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from rljob_api.functions.conventions import load_signatures
from rljob_api.functions.forms import describe_signature
from rljob_api.functions.plugins import ENVIRONMENTS, SIGNATURES, describe_unknown, find_plugins
from rljob_api.manifest.job_spec import Service
from rljob_api.manifest.services.calls import CallService
from rljob_api.manifest.services.function import PythonFunction
from rljob_api.manifest.services.models import JudgeReward, UserModel, find_judge_problems
from rljob_api.manifest.services.reward import FunctionReward, Reward
from rljob_api.manifest.services.runner import COMMAND_MODULE
from rljob_cli.check.jobfile import Finding, Target
from rljob_cli.local.secrets import find_reference
from rljob_inputs.data.files import suggest_path

_PROGRAMS_OF_IMAGE = ("bash", "env", "python", "python3", "sh", "uv")
"""What RLJob's image has, where a runner without its own runs."""


def check_service(service: Service) -> Iterator[Finding]:
    """Check a function's source, a judge's parser, a user's persona or a runner's command, without executing it."""
    settings = service.settings
    if isinstance(settings, CallService):
        if settings.user_model is not None:
            yield from _check_user_model(settings.user_model, f"{service.path}.model")
    elif settings.judge is not None:
        yield from _check_judge(settings.judge, f"{service.path}.judge")
    yield from _check_key(settings, f"{service.path}.{settings.kind}")
    # An image may have other plugins and programs. A template may name one, or mount them.
    where_missing: Target | None = "local" if settings.image or settings.template else None
    if service.framework and service.framework not in (adapters := find_plugins(ENVIRONMENTS)):
        problem = describe_unknown(service.framework, adapters)
        yield Finding("spec.agent.environment.framework", problem, only=where_missing)
    if (function := settings.function) is not None:
        if isinstance(function, FunctionReward):
            known = load_signatures(find_plugins(SIGNATURES))
            if function.signature not in known.names:
                problem = describe_signature(function.signature, known)
                yield Finding(f"{service.path}.function.signature", problem, only=where_missing)
        if function.module == COMMAND_MODULE:
            command = _check_command(**function.factory_args or {}, path=service.path, where_missing=where_missing)
            yield from command if settings.image is None else ()
        yield from _check_function(function, f"{service.path}.function")


def _check_judge(judge: JudgeReward, path: str) -> Iterator[Finding]:
    for name, problem in find_judge_problems(judge):
        yield Finding(f"{path}.{name}", problem)


def _check_user_model(model: UserModel, path: str) -> Iterator[Finding]:
    if model.stop is not None and model.stop not in model.persona:
        remedy = "add to the persona when to write it, or remove stop"
        problem = f"does not contain stop ({model.stop}), which the model must write to end a conversation; {remedy}"
        yield Finding(f"{path}.persona", problem, is_warning=True)


def _check_key(settings: Reward | CallService, path: str) -> Iterator[Finding]:
    reference = find_reference(settings)
    if reference and not os.environ.get(reference.key):
        problem = f"refers to a cluster's Secret, which ${reference.key} replaces on this machine; set that variable"
        yield Finding(f"{path}.endpoint.apiKeySecretRef.key", problem, only="local")


def _check_function(function: PythonFunction, path: str) -> Iterator[Finding]:
    if function.inline is not None:
        if problem := _find_syntax_error(function.inline):
            line, message = problem
            yield Finding(f"{path}.inline", f"line {line}: {message}", line_within=line)
    elif function.config_map_key_ref is not None:
        reference = function.config_map_key_ref
        message = (
            f"names the ConfigMap {reference.name}, which is not in this file; add it after ---, or use function.file"
        )
        yield Finding(f"{path}.configMapKeyRef", message, only="local")
    elif function.file is not None and (found := _check_file(Path(function.file))):
        yield Finding(f"{path}.file", found)


def _check_file(file: Path) -> str:
    """Return why a file cannot be run; empty if it is Python source."""
    if not file.exists():
        return f"file {file} not found{suggest_path(file)}"
    if not file.is_file():
        return f"{file} must be a Python file, got a folder"
    try:
        problem = _find_syntax_error(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        return f"{file} is not UTF-8 text (byte {error.start}); it must be Python source"
    return f"{file}:{problem[0]}: {problem[1]}" if problem else ""


def _find_syntax_error(source: str) -> tuple[int, str] | None:
    """Return its line and what is wrong."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source.removeprefix("\ufeff"), "<source>", "exec", dont_inherit=True)
    except SyntaxError as error:
        return error.lineno or 1, f"syntax error: {error.msg}"
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes; nested too deeply
        return 1, f"cannot be parsed: {error}"
    return None


def _check_command(
    command: Sequence[str], working_dir: str | None, path: str, where_missing: Target | None
) -> Iterator[Finding]:
    """Check that this machine has the program, its folder, and the script of an interpreter. `where_missing`: where a
    program that is neither here nor in RLJob's image is missing."""
    if not command:  # another check has reported it
        return
    program, *arguments = command
    if working_dir is not None and not Path(working_dir).is_dir():
        what = "is not a folder" if Path(working_dir).exists() else "not found"
        yield Finding(f"{path}.workingDir", f"{working_dir} {what}", only="local")
        return
    folder = Path(working_dir) if working_dir is not None else None
    if "/" in program:
        found = folder / program if folder else Path(program)  # an absolute path stays
        is_found = os.access(found, os.X_OK) and found.is_file()
    else:
        # `rljob run` finds its own environment's programs first.
        path_of_run = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
        is_found = shutil.which(program, path=path_of_run) is not None
    if not is_found:
        remedy = "install it, correct the name, or set runner.image to run it on a cluster"
        only = "local" if program in _PROGRAMS_OF_IMAGE else where_missing
        yield Finding(f"{path}.command[0]", f"{program} is not a program of this machine; {remedy}", only=only)
        return
    for index, argument in enumerate(arguments, start=1):
        if argument.startswith("-"):
            continue
        if argument.endswith(".py") and not Path(argument).is_absolute():
            yield from _check_script(argument, folder, f"{path}.command[{index}]")
        return  # those that follow are the script's own


def _check_script(script: str, folder: Path | None, path: str) -> Iterator[Finding]:
    if folder is None:
        message = (
            f"{script} is relative, and the command starts in a scratch folder; set runner.workingDir to its folder"
        )
        yield Finding(path, message)
    elif not (folder / script).is_file():
        yield Finding(path, f"{script} not found in {folder}{suggest_path(folder / script)}", only="local")
