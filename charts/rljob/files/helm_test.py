"""`helm test`: the operator answers /readyz, and the API server accepts an RLJob in a dry run."""

import json
import os
import ssl
import urllib.error
import urllib.request

CREDENTIALS = "/var/run/secrets/kubernetes.io/serviceaccount"
JOB = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "helm-test"},
    "spec": {
        "model": {"source": "hf://Qwen/Qwen3-0.6B"},
        "data": {"train": {"source": "hf://openai/gsm8k", "subset": "main", "prompt": "question", "answer": "answer"}},
        "rewards": [{"name": "any", "function": {"inline": "def compute_score(*args, **kwargs):\n    return 0.0\n"}}],
        "schedule": {"steps": 1},
    },
}


def ask(request, **options):
    try:
        with urllib.request.urlopen(request, timeout=30, **options) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{request.full_url} answered {error.code}: {error.read().decode()}") from error


if os.environ["READY_URL"]:
    ask(urllib.request.Request(os.environ["READY_URL"]))
    print("the operator is ready")

host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
url = f"https://{f'[{host}]' if ':' in host else host}:{port}"
url += f"/apis/rljob.dev/v1alpha1/namespaces/{os.environ['NAMESPACE']}/rljobs?dryRun=All"
with open(f"{CREDENTIALS}/token") as file:
    headers = {"Authorization": f"Bearer {file.read()}", "Content-Type": "application/json"}
context = ssl.create_default_context(cafile=f"{CREDENTIALS}/ca.crt")
ask(urllib.request.Request(url, json.dumps(JOB).encode(), headers), context=context)
print("the API server takes an RLJob")
