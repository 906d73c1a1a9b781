"""What the reward jobs need on the claim: a chat model, a random classifier, sums, and the wheels of math-verify.

The wheels, and a virtual environment that scores with them directly, are created once, in .models.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from harness import ROOT, execute, log_step, python

FOLDER = ROOT / ".models/e2e-rewards"
WHEELS = FOLDER / "wheels"
CHAT_MODEL = ROOT / ".models/smollm2-135m-instruct"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_INTERPRETER = FOLDER / "venv/bin/python"
_VERIFY = """
import json, sys
from math_verify import parse, verify
print(json.dumps([float(verify(parse(truth), parse(text))) for text, truth in json.load(sys.stdin)]))
"""


def prepare() -> bytes:
    """Return all files as a tar archive."""
    log_step("creating the models of the reward jobs, and downloading math-verify")
    python("examples/prepare.py", "tiny", "judge")
    _make_classifier(FOLDER / "classifier")
    _fetch_wheels()
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(CHAT_MODEL, CHAT_MODEL.name)
        tar.add(FOLDER / "classifier", "classifier")
        tar.add(WHEELS, "wheels")
        sums = "".join(f"{json.dumps(_build_sum(a, b))}\n" for a in range(1, 6) for b in range(1, 6)).encode()
        about = tarfile.TarInfo("sums.jsonl")
        about.size, about.mode = len(sums), 0o644
        tar.addfile(about, io.BytesIO(sums))
    return archive.getvalue()


def verify_directly(pairs: list[tuple[str, str]]) -> list[float]:
    """Score pairs of completion and ground truth with math-verify, without a server."""
    found: list[float] = json.loads(execute(_INTERPRETER, "-c", _VERIFY, input=json.dumps(pairs).encode()))
    return found


def _build_sum(a: int, b: int) -> dict[str, Any]:
    return {"question": f"What is {a} + {b}? Reply with the number only.", "answer": str(a + b)}


def _make_classifier(folder: Path) -> None:
    if folder.exists():
        return
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tiny = ROOT / ".models/tiny-qwen3"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)  # Pods run as another user


def _fetch_wheels() -> None:
    if _INTERPRETER.exists() and WHEELS.exists():
        return
    execute(sys.executable, "-m", "venv", "--clear", _INTERPRETER.parents[1])
    pip = (_INTERPRETER, "-m", "pip", "--quiet", "--disable-pip-version-check")
    try:
        execute(*pip, "download", "--no-deps", "--only-binary=:all:", "-d", WHEELS, "-r", REQUIREMENTS)
        execute(*pip, "install", "--no-index", "--no-deps", "-r", REQUIREMENTS, "--find-links", WHEELS)
    except BaseException:
        subprocess.run(["rm", "-rf", _INTERPRETER.parents[1], WHEELS], check=False)
        raise
