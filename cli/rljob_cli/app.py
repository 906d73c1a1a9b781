"""The typer application that all commands are added to."""

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rljob_cli.exits import EXIT_BAD_INPUT
from rljob_cli.groups import group_commands
from rljob_cli.output import choose_format, is_json, print_error


class _Commands(TyperGroup):
    """Lists commands by what they act on, and prints invalid arguments as JSON if `--output json` requests it."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which the shell completes them, whatever file declares them."""
        return sorted(self.commands)

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
