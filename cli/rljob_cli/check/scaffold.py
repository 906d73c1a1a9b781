"""`rljob init`: a small valid job to start from. Owns the files' text; overwrites nothing."""

import json
import re
from pathlib import Path

from rljob_api.errors import UserError
from rljob_cli.exits import guard
from rljob_cli.output import print_json

_JOB = """\
# Try the reward, check the job, run it:
#   rljob test-reward rljob.yaml --file data/completions.jsonl
#   rljob validate rljob.yaml
#   rljob run rljob.yaml
# Relative paths start at this file.
apiVersion: rljob.dev/v1alpha1
kind: RLJob
metadata:
  name: {name}
spec:
  model:
    source: hf://HuggingFaceTB/SmolLM2-135M-Instruct    # or a folder: ./my-model
  data:
    train: {{source: ./data/train.jsonl, prompt: question, answer: answer}}
    eval: {{source: ./data/eval.jsonl, prompt: question, answer: answer}}
    systemPrompt: Answer with the number alone.
  rewards:
  - name: correct
    function: {{file: reward.py}}
    timeoutSeconds: 10
    slots: 2
  algorithm:
    groupSize: 8
    optimizer: {{learningRate: 3.0e-5}}
  schedule:
    steps: 20
    promptsPerStep: 8
  trainer:
    replicas: 1
    gpusPerReplica: 0      # GPUs of each replica; 0 runs on CPU
  rollout:
    replicas: 1
    gpusPerReplica: 0
    maxModelLen: 512
    sampling: {{temperature: 1.0, maxTokens: 32}}
  evaluation:
    accuracy: exact        # the component of the reward that counts as accuracy
"""

_REWARD = '''\
"""The reward of a completion. Change it to train for another goal.

The signature is verl's. A dict needs `score`; other numbers in it become curves. `rljob test-reward` and the logs of a
run show what this file prints. After an exception the sample is masked: it never counts as zero.
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right answer alone, 0.5 if it is the last number of a longer answer."""
    numbers = re.findall(r"-?\\d+", solution_str)
    exact = solution_str.strip() == ground_truth
    last = bool(numbers) and numbers[-1] == ground_truth
    return {"score": 0.5 * last + 0.5 * exact, "exact": exact, "last": last}
'''

_README = """\
# {name}

| file | contents |
|---|---|
| `rljob.yaml` | the job; every field is in docs/reference.md of RLJob |
| `reward.py` | the reward, a Python function in verl's signature |
| `data/train.jsonl`, `data/eval.jsonl` | one row per line; `rljob.yaml` names the columns `question` and `answer` |
| `data/completions.jsonl` | completions to test the reward with |

```
rljob test-reward rljob.yaml --file data/completions.jsonl
rljob validate rljob.yaml
rljob run rljob.yaml
```
A run writes `runs/{name}/`: metrics.jsonl, logs, checkpoints, the trained model under export/, curves.png and
summary.json.
"""


@guard
def write_scaffold(directory: Path, output: str) -> int:
    name = re.sub(r"[^a-z0-9]+", "-", directory.resolve().name.lower()).strip("-") or "my-job"
    name = name if name[0].isalpha() else f"job-{name}"
    name = name[:40].rstrip("-")
    files = build_files(name)
    taken = [file for file in files if (directory / file).exists()]
    if taken:
        raise UserError(f"{directory} already has {', '.join(taken)}; choose another folder")
    for file, text in files.items():
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text(text)
    following = f"rljob test-reward {directory}/rljob.yaml --file {directory}/data/completions.jsonl"
    if output == "json":
        print_json({"directory": str(directory), "files": list(files), "next": following})
    else:
        print(f"wrote {', '.join(files)} in {directory}")
        print(f"next: {following}")
    return 0


def build_files(name: str) -> dict[str, str]:
    sums = [(a, b) for a in range(1, 13) for b in range(1, 13)]
    held_out = [(a, b) for a, b in sums if (a * b) % 5 == 0]
    rows = {
        "train": [_row(a, b) for a, b in sums if (a, b) not in held_out],
        "eval": [_row(a, b) for a, b in held_out],
        "completions": [
            {"prompt": "What is 2 + 3?", "completion": "5", "answer": "5"},
            {"prompt": "What is 2 + 3?", "completion": "The sum is 5", "answer": "5"},
            {"prompt": "What is 2 + 3?", "completion": "6", "answer": "5"},
        ],
    }
    data = {f"data/{stem}.jsonl": "".join(json.dumps(row) + "\n" for row in found) for stem, found in rows.items()}
    return {"rljob.yaml": _JOB.format(name=name), "reward.py": _REWARD, "README.md": _README.format(name=name), **data}


def _row(a: int, b: int) -> dict[str, str]:
    return {"question": f"What is {a} + {b}?", "answer": str(a + b)}
