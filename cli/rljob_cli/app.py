"""The typer application that all commands are added to."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rljob_cli.exits import EXIT_BAD_INPUT, guard
from rljob_cli.output import choose_format, is_json, print_error

_GROUPS = {
    "Job files": ("init", "validate", "plan", "test-reward", "test-agent"),
    "On this machine": ("try", "run", "evaluate", "serve"),
    "Data of a run": ("ui", "trajectories", "report", "export"),
    "Runs and jobs": ("ls", "top", "explain", "logs", "suspend"),
    "In a cluster": ("submit", "resume", "restart"),
}

_OTHERS = "Other commands"

_MEANT = {
    **{"stop": "suspend", "list": "ls", "ps": "ls", "status": "explain", "train": "run"},
    **{"render": "validate --render", "retry": "resume --retry"},
}
"""Commands of others, and earlier ones."""

_INDENT = 6
"""Columns that a list of commands takes besides names and texts."""


class _Commands(TyperGroup):
    """Lists commands by what they act on, and prints invalid arguments as JSON if `--output json` requests it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which the shell completes them, whatever file declares them."""
        return sorted(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if (meant := _MEANT.get(args[0])) is not None:
            ctx.fail(f"No such command '{args[0]}'; here it is `rljob {meant}`.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, rows in group_commands(self.commands.values(), formatter.width):
            with formatter.section(title):
                formatter.write_dl(rows)

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        arguments = sys.argv[1:] if args is None else list(args)
        with choose_format(arguments):
            if not is_json():
                return super().main(arguments, prog_name, complete_var, standalone_mode, windows_expand_args, **extra)
            try:
                code = super().main(arguments, prog_name, complete_var, standalone_mode=False)
            except Exception as error:
                if not hasattr(error, "format_message"):  # typer's usage errors have no public base class
                    raise
                print_error(error.format_message(), EXIT_BAD_INPUT)
                code = EXIT_BAD_INPUT
        sys.exit(code)


app = typer.Typer(
    cls=_Commands,
    help="Reinforcement-learning post-training of language models, on this machine or in a cluster.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _print_version(requested: bool) -> None:
    if requested:
        from rljob_cli.version import print_version

        print_version()
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print all versions.")
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models, on this machine or in a cluster."""


def command(name: str | None = None, **settings: Any) -> Callable[[Callable[..., int]], None]:
    """Add a command: a function that returns its exit code. A parameter that is a dataclass stands for its fields: each
    is an argument or an option."""

    def add(function: Callable[..., int]) -> None:
        def run(**given: Any) -> None:
            raise typer.Exit(guard(_call)(function, given))

        parameters = list(_flatten(function))
        run.__doc__, run.__name__ = function.__doc__, function.__name__
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        app.command(name, **settings)(run)

    return add


def _flatten(function: Callable[..., Any]) -> Iterator[Parameter]:
    for each in signature(function).parameters.values():
        if is_dataclass(each.annotation):
            yield from _flatten(each.annotation)  # type: ignore[arg-type]
        else:
            yield each.replace(kind=Parameter.KEYWORD_ONLY)


def _call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call a function, or build a dataclass, with its part of the given values."""
    values = {}
    for name, each in signature(function).parameters.items():
        kind = each.annotation
        values[name] = _call(kind, given) if is_dataclass(kind) else given[name]  # type: ignore[arg-type]
    return function(**values)


def group_commands(commands: Iterable[Any], width: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the title of each group, and its commands with a line of help for a terminal of this width."""
    shown = {command.name: command for command in commands if not command.hidden}
    limit = width - max(map(len, shown), default=0) - _INDENT
    groups = {title: [name for name in names if name in shown] for title, names in _GROUPS.items()}
    known = {name for names in groups.values() for name in names}
    groups[_OTHERS] = [name for name in shown if name not in known]
    longest = max(map(len, shown), default=0)
    for title, names in groups.items():
        if names:
            yield title, [(name.ljust(longest), shown[name].get_short_help_str(limit)) for name in names]
