"""The settings of a script with TRL's GRPOTrainer, read from its syntax tree: nothing of it runs.

The tree is written with one statement a line. From the first line to the last, names are replaced by what was assigned
to them, so that the trainer's call has its configurations, data, model and rewards in it. What is assigned under a
condition is `maybe(VALUE)`. Invariant: a setting is a literal that the script passes, or Computed; none is left out.
"""

import ast
import re
from typing import Any


class Computed(str):
    """The text of what only a run of the file would tell."""


_ASSIGNMENTS = {
    r"([\w, ()]+?)(?:: [^=]+)? = (?:\w+ = )*(.*)": r"\1 = MAYBE(\2)",
    r"return (.*)": r"return = \1",
    r"(\w+) \+= (.*)": r"\1 = \1 + MAYBE(\2)",
    r"(\w+)\.extend(\(.*\))": r"\1 = \1 + MAYBE\2",
    r"(\w+)\.append(\(.*\))": r"\1 = \1 + [MAYBE\2]",
    r"(\w+)\.(insert|remove|pop|clear)(\(.*\))": r"\1 = \1 + [\2\3]",
    r"(\w+)\.update(\(.*\))": r"\1 = replace(\1, **MAYBE(dict\2))",
    r"(\w+)(?:\.|\[')(\w+)(?:'\])? = (.*)": r"\1 = replace(\1, \2=MAYBE(\3))",
}
"""Statements that change a name, and the same as an assignment to it."""
_NAME = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?<![\w.])[A-Za-z_]\w*(?![\w'"]|=[^=])\(?""")
"""A string, or a name that is no keyword, with the parenthesis of its call."""
_BRANCH = re.compile(r"(if (?!__name__)|elif|else|for|while|try|except|match|case)\b")
_PARAMETERS = {
    "load_dataset": "path name data_dir data_files split cache_dir features",
    "from_pretrained": "name",
    "replace|dict": "**",
    ".*AsyncGRPOTrainer": "model reward_funcs args train_dataset processing_class callbacks optimizers tools",
    ".*Trainer": "model reward_funcs args train_dataset eval_dataset processing_class "
    "reward_processing_classes callbacks",
    ".*Config": "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type",
}
"""By name of a call, the first that matches: its first parameters, in order."""
_FOLLOWED = {
    "": ".*GRPOTrainer",
    "args": ".*Config|replace",
    "peft_config": ".*Config|replace",
    "model": "from_pretrained",
    "train_dataset": "load_dataset",
    "eval_dataset": "load_dataset",
}
"""By setting: the names of calls whose arguments are settings, too."""
_MAX_CHARACTERS = 10000
"""A longer value does not replace its name."""


def read_trl_script(text: str) -> dict[str, Any]:
    """Return the settings; those of data and model with the argument's name and a dot, rewards with `reward_funcs.` and
    their place: NAME, MODULE.NAME or Computed. Raise SyntaxError."""
    text = ast.unparse(ast.parse(text))
    defined = re.findall(r"(?m)^(?:async )?(?:def|class) (\w+)", text)
    settings: dict[str, Any] = {}
    inlined = _inline_names(text)
    starts = ("",) if "GRPOTrainer(" in inlined else ("args", "train_dataset")
    pending: list[tuple[str, ast.AST]] = [(name, ast.parse(inlined)) for name in starts]
    for name, value in pending:
        shown, prefix = ast.unparse(value), "" if name in ("", "args", "peft_config") else f"{name}."
        calls = _find_calls(value, _FOLLOWED.get(name, "-"))
        pending += [(prefix + key, each) for call in calls for key, each in _bind(call).items()]
        if name == "reward_funcs":
            pending += [(f"{prefix}{place}", each) for place, each in enumerate(_list_parts(value))]
        elif prefix.startswith("reward_funcs."):
            is_name = shown in defined or re.fullmatch(r"\w+(\.\w+)+", shown)
            settings[name] = shown if is_name else Computed(shown)
        elif isinstance(value, ast.expr) and value not in calls:
            try:
                literal = ast.literal_eval(shown)
            except ValueError:
                literal = Computed(shown)
            same = settings.get(name, literal) == literal
            settings[name] = literal if same else Computed(f"{settings[name]} or {shown}")
    return settings


def _inline_names(text: str) -> str:
    """Return the calls of the trainer; without one, all values."""
    known: dict[str, str] = {}
    returned: dict[str, str] = {}
    trainers: list[str] = []
    values: list[str] = []
    branches: list[int] = []
    outer: list[tuple[int, str, dict[str, str]]] = []
    for line in re.sub(r'(?s)""".*?"""', "''", text).splitlines():
        statement = line.lstrip()
        indent = len(line) - len(statement)
        branches = [each for each in branches if each < indent] + [indent] * bool(_BRANCH.match(statement))
        while statement and outer and indent <= outer[-1][0]:
            known = outer.pop()[2]
        for pattern, assignment in _ASSIGNMENTS.items():
            statement = re.sub(f"^{pattern}$", assignment, statement)
        if started := re.match(r"(?:async )?def (\w+\()(.*)", statement):
            outer.append((indent, started[1], known))
            known = {name: value for name, value in known.items() if name not in re.findall(r"\w+", started[2])}
        if imported := re.match(r"from [.]*(\S+) import (.*)", statement):
            parts = re.findall(r"(\w+)(?: as (\w+))?", imported[2])
            known.update((alias or name, f"{imported[1]}.{name}") for name, alias in parts)
        statement = statement.replace("MAYBE", "maybe" if branches else "")
        [(names, value)] = re.findall(r"^(?:([\w, ()]+) = )?(.*)$", statement)
        by = known | returned
        value = _NAME.sub(lambda found: by.get(found[0], found[0]), value)  # noqa: B023 - called at once
        try:
            ast.parse(value, mode="eval")
        except SyntaxError:  # a statement that assigns nothing
            continue
        values.append(value)
        if "GRPOTrainer(" in value:
            trainers.append(value.removeprefix("maybe"))
        for name in names.strip("()").split(", ") if len(value) < _MAX_CHARACTERS else ():
            known[name] = f"({value})"
            if name == "return":
                returned[outer[-1][1]] = f"({value})("
    return "\n".join(trainers or values)


def _find_calls(node: ast.AST, names: str) -> list[ast.AST]:
    """Return the outermost calls of these names, but those under a condition."""
    called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
    if re.fullmatch(names, called):
        return [node]
    children = ast.iter_child_nodes(node) if called != "maybe" else ()
    return [call for each in children for call in _find_calls(each, names)]


def _bind(node: ast.AST) -> dict[str, ast.AST]:
    """Return the arguments of a call or a dict; `**` and its text for another node."""
    called = ast.unparse(getattr(node, "func", node)).rpartition(".")[2]
    names = next((names for pattern, names in _PARAMETERS.items() if re.fullmatch(pattern, called)), "")
    match node:
        case ast.Dict(keys, values):
            given = [
                (ast.unparse(key).strip("'") if key else "**", each) for key, each in zip(keys, values, strict=True)
            ]
        case ast.Call(_, values, options) if names:
            given = [*zip(names.split(), values, strict=False), *((each.arg or "**", each.value) for each in options)]
        case _:
            return {f"**{ast.unparse(node)}": node}
    bound: dict[str, ast.AST] = {"AsyncGRPOTrainer": ast.Constant(True)} if "Async" in called else {}
    for name, each in given:
        bound |= _bind(each) if name == "**" else {name: each}
    return bound


def _list_parts(node: ast.AST) -> list[ast.AST]:
    """Return the elements of lists that are added up."""
    if not isinstance(node, ast.List | ast.Tuple | ast.BinOp | ast.Starred):
        return [node]
    parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
    return [each for part in parts for each in _list_parts(part)]
