"""Runs Python code as a cell of a notebook: `python code_runner.py CODE`. If its last line is an expression, its value
is shown. Invariant: tracebacks have only the frames of the code.

Also what all providers of sandboxes agree on: which program runs code, and which code does not run.
"""

import ast
import linecache
import os
import sys
import types

PYTHON = "python"
"""The language; the other one is shell."""
_SHELLS = ("/bin/bash", "/bin/sh")
"""The first that exists. In a worker's sandbox, a start of a process waits for the server. The signal that an earlier
process has ended interrupts this wait in dash, which reports `Cannot fork`; bash lets the kernel repeat the call."""
_MAX_CODE_BYTES = 100_000
"""The kernel takes 128 KiB as one argument of a program."""
_NAME = "<code>"
_FAILED = 1


def build_command(language: str, code: str) -> list[str]:
    """Return the program that runs the code."""
    if language != PYTHON:
        return [next(filter(os.path.exists, _SHELLS)), "-c", code]
    # -P: not the folder of this file, which has modules of RLJob.
    options = ["-P"] if sys.version_info >= (3, 11) else []
    return [sys.executable, *options, os.path.abspath(__file__), code]


def find_problem(code: str) -> str:
    """Return why no program can run the code, for the model; empty if one can."""
    try:
        num_bytes = len(code.encode())
    except UnicodeEncodeError:
        return "[not run: the code has half of a character]"
    if num_bytes > _MAX_CODE_BYTES:
        return f"[not run: the code has more than {_MAX_CODE_BYTES} bytes]"
    return "[not run: the code has a null character]" if "\0" in code else ""


def main() -> int:
    code = sys.argv[1]
    sys.argv[:] = [""]
    sys.path.insert(0, "")
    for stream in (sys.stdout, sys.stderr):
        # By lines: what was printed before the program is killed counts, too.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    linecache.cache[_NAME] = (len(code), None, code.splitlines(keepends=True), _NAME)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    try:
        _run(code, vars(module))
    except SystemExit:
        raise
    except BaseException as error:
        _show(error)
        return _FAILED
    return 0


def _run(code: str, namespace: dict[str, object]) -> None:
    tree = ast.parse(code, _NAME)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _NAME, "exec"), namespace)
    if isinstance(last, ast.Expr):
        sys.displayhook(eval(compile(ast.Expression(last.value), _NAME, "eval"), namespace))


def _show(error: BaseException) -> None:
    import traceback  # here, since most code does not fail

    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != _NAME:
        frames = frames.tb_next
    sys.stdout.flush()
    traceback.print_exception(type(error), error, frames)


if __name__ == "__main__":
    sys.exit(main())
