"""The arguments and options of the commands of `rljob`: those of several, and of each command with many as one class,
which its work gets whole.

A command that takes files takes `JobFiles`, one that reaches a cluster `Target`, and one that prints a result
`OutputOption`.
"""

import contextlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

Given = TypeVar("Given", str, list[str], None)


def check_text(given: Given) -> Given:
    """Callback of options that models and functions read. Bytes that are no UTF-8 are halves of characters in Python,
    which neither a tokenizer nor a request takes."""
    for text in given if isinstance(given, list) else [given or ""]:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise typer.BadParameter("is not UTF-8 text; pass it in a file, or correct the bytes")
    return given


def complete_runs(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the run folders, for the shell; an error completes nothing."""
    parent = Path(context.params.get("directory") or RUNS)
    with contextlib.suppress(OSError):
        names = sorted(folder.name for folder in parent.iterdir() if folder.is_dir())
        return [name for name in names if name.startswith(incomplete)]
    return []


RUNS = Path("runs")
"""Default parent of the folders of runs."""
DirectoryOption = Annotated[Path, typer.Option("--dir", help="Parent of the run folders.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, job file, or job's name.", autocompletion=complete_runs)
]
OpenOption = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Change a field: spec.schedule.steps=3.")
]
VolumeOption = Annotated[
    list[str] | None,
    typer.Option("--volume", metavar="CLAIM=DIR", help="Local folder to use for a claim (pvc://); repeatable."),
]
PolicyOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="RLJobPolicy of the namespace: kubectl get rljobpolicy default -o yaml."),
]
NoCallOption = Annotated[
    bool, typer.Option("--no-call", help="Do not call each reward function once before anything starts.")
]
NetworkOption = Annotated[
    str | None, typer.Option(metavar="127.X.Y.0", help="Loopback block of the run's Pods. Default: a free one.")
]
ContextOption = Annotated[str | None, typer.Option(help="Context of the kubeconfig. Default: the current one.")]
KubeconfigOption = Annotated[str | None, typer.Option(help="Kubeconfig. Default: $KUBECONFIG, then ~/.kube/config.")]
NamespaceOption = Annotated[str | None, typer.Option("-n", "--namespace", help="Default: the context's.")]
Format = Literal["text", "json"]
ForceOption = Annotated[bool, typer.Option("--force", help="Even if training loses its steps: no claim has them.")]
OutputOption = Annotated[Format, typer.Option("-o", "--output", help="Format of the result and of errors.")]
"""With json, stdout has nothing but JSON."""


@dataclass(frozen=True)
class JobFiles:
    jobs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="JOB.yaml", show_default=False, help="Files with an RLJob each, or folders of `init`; - is stdin."
        ),
    ] = None
    filenames: Annotated[
        list[Path] | None,
        typer.Option("-f", "--filename", metavar="JOB.yaml", help="The same, as in kubectl; repeatable."),
    ] = None

    @property
    def paths(self) -> list[Path]:
        """The files of the arguments and of -f, in this order."""
        given = [*(self.jobs or []), *(self.filenames or [])]
        files = [each / "rljob.yaml" if (each / "rljob.yaml").is_file() else each for each in given]
        if not files:
            raise typer.BadParameter("pass a job's file: JOB.yaml, -f JOB.yaml, or - for stdin")
        return files

    @property
    def path(self) -> Path:
        """The only file, for a command that takes one job."""
        file, *more = self.paths
        if more:
            raise typer.BadParameter(f"takes one job's file, got {len(more) + 1}")
        return file


@dataclass(frozen=True)
class Target:
    """The cluster and namespace, as in kubectl's options. None: as the kubeconfig says."""

    namespace: NamespaceOption = None
    context: ContextOption = None
    kubeconfig: KubeconfigOption = None

    def __bool__(self) -> bool:
        """Whether an option names it: commands that also work without a cluster then use it."""
        return any((self.namespace, self.context, self.kubeconfig))

    def exists(self) -> bool:
        """Whether there is a cluster to ask."""
        return bool(self or os.environ.get("KUBECONFIG")) or Path("~/.kube/config").expanduser().exists()


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    files: JobFiles
    directory: Annotated[Path, typer.Option("--dir", help="Parent of run folders; this run uses DIR/NAME.")] = RUNS
    overrides: SetOption = None
    volumes: VolumeOption = None
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over; the existing run folder is renamed.")] = False
    output: Annotated[
        Literal["live", "plain", "json"],
        typer.Option("-o", "--output", help="live needs a terminal, else it is plain. json: one object per line."),
    ] = "live"
    network: NetworkOption = None
    no_call: NoCallOption = False


@dataclass(frozen=True, kw_only=True)
class ValidateOptions:
    files: JobFiles
    overrides: SetOption = None
    volumes: VolumeOption = None
    cluster: Annotated[
        bool, typer.Option("--cluster", help="For `kubectl apply`: needs no GPU, memory or file of this machine.")
    ] = False
    local: Annotated[bool, typer.Option("--local", help="For `rljob run` on this machine.")] = False
    render: Annotated[
        bool, typer.Option("--render", help="Print the objects that the operator creates, as YAML or JSON (-o json).")
    ] = False
    policy: PolicyOption = None
    no_call: NoCallOption = False
    output: OutputOption = "text"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    files: JobFiles
    overrides: SetOption = None
    volumes: VolumeOption = None
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|SIZE", help="Memory of each GPU: h100-80gb, 80GiB. Default: labels of nodePool."),
    ] = None
    gpus: Annotated[
        int | None, typer.Option(min=0, metavar="COUNT", help="GPUs that there are in all. Default: enough.")
    ] = None
    output: OutputOption = "text"


@dataclass(frozen=True, kw_only=True)
class TryRewardOptions:
    files: JobFiles
    reward: Annotated[str | None, typer.Option(help="Name of the reward. Default: all that the job serves.")] = None
    completion: Annotated[
        list[str] | None,
        typer.Option(help="Completion to score. Repeat it to score a group.", callback=check_text),
    ] = None
    answer: Annotated[str | None, typer.Option(help="The ground truth.", callback=check_text)] = None
    prompt: Annotated[str, typer.Option(help="The prompt that the model was given.", callback=check_text)] = ""
    file: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with completion, answer, prompt; other keys become extra_info. If the reward scores "
            "groups, rows with the same prompt (or `group`) are a group."
        ),
    ] = None
    overrides: SetOption = None
    network: NetworkOption = None
    output: OutputOption = "text"


@dataclass(frozen=True, kw_only=True)
class TryAgentOptions:
    files: JobFiles
    row: Annotated[int, typer.Option(min=0, help="Row of data.train, from 0.")] = 0
    episodes: Annotated[int, typer.Option(min=1, help="How many episodes the base model plays.")] = 1
    completion: Annotated[
        list[str] | None,
        typer.Option(
            help="A completion of the policy, in order; repeatable. Needs no model, and takes seconds.",
            callback=check_text,
        ),
    ] = None
    overrides: SetOption = None
    volumes: VolumeOption = None
    network: NetworkOption = None
    full: Annotated[bool, typer.Option("--full", help="Show long texts in full.")] = False
    output: OutputOption = "text"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    files: JobFiles
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            metavar="SOURCE|RUN@STEP",
            help="A folder, hf://org/name or pvc://claim/path; or a checkpoint of a run: its step, best, last or "
            "export. Repeatable. Default: spec.model.",
            autocompletion=complete_runs,
        ),
    ] = None
    directory: Annotated[
        Path, typer.Option("--dir", help="Parent of run folders; results are in DIR/NAME-evaluate.")
    ] = RUNS
    overrides: SetOption = None
    volumes: VolumeOption = None
    network: NetworkOption = None
    no_call: NoCallOption = False
    output: OutputOption = "text"


@dataclass(frozen=True, kw_only=True)
class ClaimOptions:
    """The claim for models and large data."""

    claim: Annotated[
        str | None, typer.Option(help="Claim for models and large data. Default: a new one, deleted with the job.")
    ] = None
    claim_size: Annotated[str | None, typer.Option(metavar="QUANTITY", help="Size of a new claim: 20Gi.")] = None
    """None: what the files need, and a fifth."""
    storage_class: Annotated[str | None, typer.Option(help="StorageClass of a new claim.")] = None
    access_mode: Annotated[
        Literal["ReadWriteMany", "ReadWriteOnce"],
        typer.Option(help="Of a new claim. ReadWriteOnce keeps the job's Pods on one node."),
    ] = "ReadWriteMany"


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    files: JobFiles
    overrides: SetOption = None
    claim: ClaimOptions
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the objects; contact no cluster.")] = False
    wait: Annotated[bool, typer.Option("-w", "--wait", help="Wait for the end of the job; show its progress.")] = False
    follow: Annotated[bool, typer.Option("--follow", help="Wait for the end of the job; show its logs.")] = False
    no_call: NoCallOption = False
    target: Target
    output: Annotated[
        Literal["text", "json", "yaml"], typer.Option("-o", "--output", help="yaml: the objects as applied.")
    ] = "text"

    def say(self, line: str) -> None:
        """Report progress: on stdout, unless that is for the result."""
        print(line, file=sys.stdout if self.output == "text" else sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class ShowOptions:
    """How `rljob trajectories` shows the samples that it selects."""

    sort: Annotated[
        Literal["latency", "reward"] | None,
        typer.Option(help="Slowest reward, or highest score, first; with --reward those of this reward."),
    ] = None
    limit: Annotated[
        int | None, typer.Option(min=0, help="Maximum rows; 0: all. Default: text 20, conversations 5, json all.")
    ] = None
    full: Annotated[bool, typer.Option("--full", help="Show long texts in full.")] = False
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Conversations: the text of each span of tokens, and which were trained.")
    ] = False
    directory: DirectoryOption = RUNS
    output: Annotated[Format, typer.Option("-o", "--output", help="json: one object per line.")] = "text"
    target: Target


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    run: RunArgument
    to: Annotated[
        str,
        typer.Option("--to", metavar="DIR|URL", help="A new folder for the model and its card; s3://... or hf://..."),
    ]
    step: Annotated[str, typer.Option(metavar="N|last|best", help="Which checkpoint.")] = "last"
    public: Annotated[bool, typer.Option("--public", help="A new repository of hf://org/name is public.")] = False
    directory: DirectoryOption = RUNS
    output: OutputOption = "text"
    target: Target


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    run: RunArgument
    should_send: Annotated[
        bool, typer.Option("--send", help="First send what trackers missed of the run, by this shell's environment.")
    ] = False
    file: Annotated[Path | None, typer.Option("--to", metavar="FILE.html", help="Default: report.html in the run.")] = (
        None
    )
    should_open: OpenOption = False
    directory: DirectoryOption = RUNS
    target: Target


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    model: Annotated[str, typer.Argument(metavar="MODEL", help="hf://org/name, or a folder in Hugging Face format.")]
    name: Annotated[
        str | None, typer.Option(help="The name by which clients ask for it. Default: org/name, or the folder's.")
    ] = None
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8700
    clients: Annotated[
        list[str] | None, typer.Option("--client", metavar="NAME", help="A client with a key of its own; repeatable.")
    ] = None
    max_rank: Annotated[int, typer.Option(min=1, max=512, help="The largest rank of an adapter.")] = 32
    max_adapters: Annotated[int, typer.Option(min=1, help="Adapters that are trained side by side.")] = 16
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to use; 0: CPUs. Default: all of this machine.")] = None
    ranks: Annotated[int, typer.Option(min=1, max=64, help="Trainer ranks without GPUs.")] = 1
    directory: DirectoryOption = RUNS
    overrides: SetOption = None
    network: NetworkOption = None
