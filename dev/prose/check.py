"""Reject words and shapes that make RLJob's prose hard to read: `python dev/prose/check.py [PATH...]`.

Reads docs, docstrings, comments, messages and names; `words.yaml` has the patterns and what to write instead. Vale was
not used: it does not see Python's strings and names. A line with `words: ok` is exempt.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
WORDS = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text())
TEXT_RULES = [(re.compile(rule["pattern"], re.I), rule["use"]) for rule in WORDS["text"]]
NAME_RULES = [(re.compile(rule["pattern"]), rule["use"]) for rule in WORDS["identifiers"]]
# Generated from docstrings that are checked, data, and this check's own patterns.
SKIPPED = re.compile(
    r"^(crds/|docs/reference\.md|charts/rljob/crds/|tests/data/|dev/prose/words\.yaml|LICENSE|uv\.lock)"
    r"|/go\.(mod|sum)$|\.(json|jsonl|png|sum)$"
)
COMMENTED = re.compile(r"(\.(ya?ml|toml|sh|tpl|txt)|Makefile|Dockerfile|/run|\.dockerignore)$")
OPT_OUT = "words: ok"
MAX_TEST_NAME_CHARACTERS = 80
MAX_SENTENCE_WORDS = 30


@dataclass(frozen=True)
class Passage:
    """Text that a person reads, and the line on which it starts."""

    line: int
    text: str


def find_passages_of_markdown(text: str) -> Iterator[Passage]:
    """Yield the document without code blocks, inline code and link targets; line numbers stay."""
    text = re.sub(r"^(```|~~~).*?^\1", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    text = re.sub(r"`[^`\n]+`", "CODE", text)
    yield Passage(1, re.sub(r"\]\([^)\s]*\)", "]", text))


def find_passages_of_python(source: str) -> Iterator[Passage]:
    """Yield comments (joined over adjacent lines), strings, and names of functions and classes."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from _join_adjacent([(t.start[0], t.string.lstrip("# ")) for t in tokens if t.type == tokenize.COMMENT])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Passage(node.lineno, node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield Passage(node.lineno, node.name.replace("_", " "))


def find_passages_of_comments(text: str) -> Iterator[Passage]:
    """Yield `#` comments, and the help that a Makefile's target has after `##`."""
    lines = enumerate(text.splitlines(), 1)
    yield from _join_adjacent(
        [(number, m[1]) for number, line in lines if (m := re.search(r"(?:^|\s)#+ ?(.*)$", line))]
    )


def _join_adjacent(lines: list[tuple[int, str]]) -> Iterator[Passage]:
    start = 0
    while start < len(lines):
        end = start + 1
        while end < len(lines) and lines[end][0] == lines[end - 1][0] + 1:
            end += 1
        yield Passage(lines[start][0], "\n".join(text for _, text in lines[start:end]))
        start = end


def find_names(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every identifier but the names of tests, which are sentences."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and not token.string.startswith("test_"):
            yield token.start[0], token.string


def find_fragments(source: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings that say whose attribute it is, and not what it is."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and str(getattr(node.value, "value", "")).startswith("Of "):
            yield node.lineno, "'Of ...': say what it is, as in 'Seconds of a step'"


def find_long_sentences(passage: Passage) -> Iterator[tuple[int, str]]:
    """Yield sentences of a document's running text (not tables or headings) that are too long."""
    for paragraph in re.finditer(r"(?:^(?![|#\s]).+\n?)+", passage.text, re.M):
        for sentence in re.split(r"(?<=[.!?:;])\s+|\n(?=[-*\d])", paragraph[0]):
            length = len(sentence.split())
            if length > MAX_SENTENCE_WORDS:
                line = passage.line + passage.text.count("\n", 0, paragraph.start() + paragraph[0].index(sentence))
                start = " ".join(sentence.split()[:6])
                yield line, f"'{start} ...' has {length} words: at most {MAX_SENTENCE_WORDS} in a sentence"


def check_file(path: Path, text: str) -> list[tuple[int, str]]:
    """Return (line, finding) of one file, in order."""
    python = path.suffix == ".py"
    if path.suffix == ".md":
        passages = list(find_passages_of_markdown(text))
    elif python:
        passages = list(find_passages_of_python(text))
    elif COMMENTED.search(path.as_posix()):
        passages = list(find_passages_of_comments(text))
    else:
        return []
    found = {
        (passage.line + passage.text.count("\n", 0, match.start()), f"'{' '.join(match[0].split())}': {use}")
        for passage in passages
        for pattern, use in TEXT_RULES
        for match in pattern.finditer(passage.text)
    }
    if path.suffix == ".md":
        found |= {finding for passage in passages for finding in find_long_sentences(passage)}
    if python:
        found |= set(find_fragments(text))
        names = list(find_names(text))
        found |= {(n, f"'{name}': {use}") for n, name in names for pattern, use in NAME_RULES if pattern.search(name)}
        long_names = re.finditer(rf"^ *(?:async )?def (test_\w{{{MAX_TEST_NAME_CHARACTERS - 4},}})", text, re.M)
        found |= {
            (text.count("\n", 0, m.start(1)) + 1, f"'{m[1]}': at most {MAX_TEST_NAME_CHARACTERS} characters")
            for m in long_names
        }
    lines = text.splitlines()
    return sorted((number, what) for number, what in found if OPT_OUT not in lines[min(number, len(lines)) - 1])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Report words that RLJob's documentation and code do not use.")
    parser.add_argument("paths", nargs="*", default=["."], help="files or folders; default: all that git tracks")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *parser.parse_args(arguments).paths],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    findings = 0
    for name in sorted(set(tracked)):
        file = Path.cwd() / name
        relative = file.resolve().relative_to(ROOT)
        if SKIPPED.search(relative.as_posix()) or not file.is_file():
            continue
        for line, finding in check_file(relative, file.read_text()):
            print(f"{relative}:{line}: {finding}")
            findings += 1
    if findings:
        print(f"{findings} findings; dev/prose/words.yaml has the patterns", file=sys.stderr)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
