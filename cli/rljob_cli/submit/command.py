"""`rljob submit`: from a job's file to a job in the cluster.

Everything that may refuse the job comes first: the file, its sources and the API server's dry run. Invariant: a refused
job leaves nothing in the cluster. A copy that fails leaves a new claim, which the next call completes.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import POLICY_NAME, RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.read.documents import Document, Problem, parse_path
from rljob_api.read.load import InvalidManifestError
from rljob_cli.check.jobfile import JobFile, load_partial
from rljob_cli.check.preflight import can_read_rows
from rljob_cli.check.template_file import place_template
from rljob_cli.check.tenant_policy import find_policy_problems, read_policy
from rljob_cli.check.verdict import describe_skipped, judge
from rljob_cli.cluster.client import Cluster, ClusterError
from rljob_cli.cluster.commands import on_cluster
from rljob_cli.cluster.logs import Selection, follow_logs
from rljob_cli.cluster.top import JobRow, view_row
from rljob_cli.exits import EXIT_FAILED
from rljob_cli.options import SubmitOptions, Target
from rljob_cli.output import print_json, say
from rljob_cli.run.snapshot import FINAL_PHASES
from rljob_cli.submit.plan import Submission, build_owners_patch, plan_submission
from rljob_cli.submit.sources import Tree, find_sources, get_value, read_tree
from rljob_cli.submit.upload import build_upload, upload
from rljob_core.backend import Manifest, ObservedState, utc_now
from rljob_core.children.common import to_yaml
from rljob_core.children.start_model import parse_start, set_claim
from rljob_core.defaults import DEFAULTS
from rljob_core.kube.resources import BY_KIND, CLAIM, POLICY, REWARD_MODEL, RLJOB, Resource
from rljob_core.plan.job import render_children
from rljob_core.plan.policy_defaults import apply_policy, choose_queue
from rljob_core.plan.reward_model import plan_reward_model
from rljob_core.plan.run_files import describe_loss
from rljob_core.plan.start_model import NOT_EXPORTED, place_model, read_start_job

_RESOURCES: Mapping[str, Resource] = {
    "RLJob": RLJOB,
    "RewardModel": REWARD_MODEL,
    "PersistentVolumeClaim": CLAIM,
    **{kind: BY_KIND[kind] for kind in ("ConfigMap", "Secret")},
}
_POLL_SECONDS = 2.0


def submit_command(options: SubmitOptions) -> int:
    """Submit each file's job. Without --wait, return when the API server has stored all jobs."""
    if options.follow and options.output != "text":
        raise UserError(f"--follow prints logs; with -o {options.output} pass --wait")
    if options.dry_run:
        print_objects(_plan_objects(options), options.output)
        return 0
    files = [_load(path, options) for path in options.files.paths]
    return max(_submit(_choose_namespace(options.target, file), file, options) for file in files)


def _plan_objects(options: SubmitOptions) -> list[Manifest]:
    """Return the objects that would be applied, in order. Raise UserError if a file is wrong."""
    files = [_load(path, options) for path in options.files.paths]
    targets = (_choose_namespace(options.target, file) for file in files)
    plans = [_plan(file, to.namespace or "default", options) for file, to in zip(files, targets, strict=True)]
    return [manifest for plan in plans for manifest in plan.objects]


def _choose_namespace(target: Target, file: JobFile) -> Target:
    """Return the target with the namespace that the file names unless the command does, as kubectl chooses it."""
    return replace(target, namespace=target.namespace or file.document.data["metadata"].get("namespace"))


def _load(path: Path, options: SubmitOptions) -> JobFile:
    """Read and check a file, as `rljob validate` does: what keeps it from running on this machine does not count."""
    file = load_partial(path, options.overrides or [], keep_references=True)
    should_call = not (options.no_call or options.dry_run)
    verdict = judge(file, Path("runs").resolve() / file.job.metadata.name, {}, should_call=should_call)
    # An absolute path is a path in the Pods.
    problems = [
        p for p in verdict.problems if not str(get_value(file.document.data, parse_path(p.path))).startswith("/")
    ]
    replace(verdict, problems=problems).raise_problems()
    verdict.print_warnings()
    if not can_read_rows():
        say(f"warning: {path}: {describe_skipped()}")
    if not file.job.spec.checkpoint.outlives_head:
        say(f"warning: {path}: {describe_loss(file.job)}")
    return file


@on_cluster
async def _submit(cluster: Cluster, file: JobFile, options: SubmitOptions) -> int:
    submission = _plan(file, cluster.namespace, options)
    policy = await _find_policy(cluster)
    children = _build_children(submission, policy, await _find_start(cluster, submission, options))
    await cluster.apply(RLJOB, submission.job, dry_run=True)
    # Of an earlier claim nothing can change.
    if submission.claim and not await cluster.find(CLAIM, submission.claim_name):
        await _apply(cluster, submission.claim, options)
    num_bytes = 0
    if submission.uploads:
        head = next(c for c in children if c["kind"] == "Job")
        pod = build_upload(head["spec"]["template"], submission.job["metadata"]["name"], submission.claim_name)
        num_bytes = await upload(cluster, pod, submission.uploads, options.say)
    applied = await _apply_all(cluster, submission, options)
    job = applied[-1]
    options.say(f"next: kubectl rljob top {job['metadata']['name']} -n {cluster.namespace}")
    phase = await _wait(cluster, job, options) if options.wait or options.follow else ""
    if options.output == "yaml":
        print_objects(applied, "yaml")
    elif options.output == "json":
        metadata = job["metadata"]
        names = [{"kind": m["kind"], "name": m["metadata"]["name"]} for m in applied]
        found = {"namespace": metadata["namespace"], "name": metadata["name"], "uid": metadata["uid"]}
        print_json(found | {"objects": names, "copied_bytes": num_bytes} | ({"phase": phase} if phase else {}))
    return EXIT_FAILED if phase == "Failed" else 0


def print_objects(objects: list[Manifest], output: str) -> None:
    """Print objects as one List of JSON, or else as documents of YAML."""
    if output == "json":
        print_json({"apiVersion": "v1", "kind": "List", "items": objects})
    else:
        print("---\n".join(map(to_yaml, objects)), end="")


def _plan(file: JobFile, namespace: str, options: SubmitOptions) -> Submission:
    documents = [file.document, *file.others]
    for document in documents:
        if document.data["kind"] not in _RESOURCES:
            raise UserError(f"{file.path}: {document.data['kind']} is not part of a job; apply it with kubectl")
    manifests = [place_template(file.document.data, file.job), *(document.data for document in file.others)]
    return plan_submission(manifests, _read_trees(file, documents), namespace, options.claim)


def _read_trees(file: JobFile, documents: list[Document]) -> dict[str, Tree]:
    """Return what each relative path of the file names. Raise InvalidManifestError with all that are missing."""
    trees: dict[str, Tree] = {}
    problems = []
    for document in documents:
        if document.data["kind"] not in ("RLJob", "RewardModel"):
            continue
        for source in find_sources(document.data):
            try:
                trees[source.path] = read_tree(source, file.path.parent, file.path)
            except UserError as error:
                problems.append(Problem(source.field, document.line_of(source.location), str(error)))
    if problems:
        raise InvalidManifestError(str(file.path), problems)
    return trees


async def _find_policy(cluster: Cluster) -> RLJobPolicy | None:
    """Return the policy of the namespace, if it has one and the user may read it."""
    try:
        manifest = await cluster.find(POLICY, POLICY_NAME)
    except ClusterError as error:
        say(f"warning: the RLJobPolicy of the namespace was not checked: {error}")
        return None
    return read_policy(manifest) if manifest else None


async def _find_start(cluster: Cluster, submission: Submission, options: SubmitOptions) -> str | None:
    """Return the claim of the job from whose model this one starts; None without one. Raise UserError if it is missing.
    One that has not ended is waited for, by the operator."""
    job = RLJob.model_validate(submission.job)
    if (start := parse_start(job)) is None:
        return None
    found = read_start_job(await cluster.find(RLJOB, start.path))
    placed, problem = place_model(job, ObservedState(start_job=found), (), utc_now())
    if problem and problem[0] == NOT_EXPORTED:
        options.say(problem[1])
        return found.claim if found else None
    if problem and (known := await _find_known_claim(cluster, job.metadata.name, start.path)):
        return known
    if problem:
        raise UserError(problem[1])
    return placed.status.start_model.claim if placed.status.start_model else None


async def _find_known_claim(cluster: Cluster, name: str, start: str) -> str | None:
    """Return the claim with which an earlier submission of the job has started. It needs no other job then."""
    stored = await cluster.find(RLJOB, name)
    placed = ((stored or {}).get("status") or {}).get("startModel") or {}
    return placed.get("claim") if placed.get("job") == start else None


def _build_children(submission: Submission, policy: RLJobPolicy | None, start_claim: str | None) -> list[Manifest]:
    """Return what the operator will create. Raise UserError with all problems of the job."""
    models = {m["metadata"]["name"]: RewardModel.model_validate(m) for m in submission.others if _is_model(m)}
    job, defaults = RLJob.model_validate(submission.job), apply_policy(DEFAULTS, policy)
    job = set_claim(job, start_claim) if start_claim else job
    children = render_children(choose_queue(job, policy, {}), "", models, defaults=defaults)
    found = list(find_policy_problems(job, models, policy)) if policy else []
    for doubt in (each.message for each in found if not each.is_certain):
        say(f"warning: {doubt}")
    if problems := [each.message for each in found if each.is_certain]:
        raise UserError("\n".join(problems))
    plans = (plan_reward_model(model, ObservedState(), utc_now(), defaults=defaults) for model in models.values())
    return children + [child for plan in plans for child in plan.children]


def _is_model(manifest: Manifest) -> bool:
    return bool(manifest["kind"] == "RewardModel")


async def _apply(cluster: Cluster, manifest: Manifest, options: SubmitOptions) -> Manifest:
    stored = await cluster.apply(_RESOURCES[manifest["kind"]], manifest)
    options.say(f"{manifest['kind']} {cluster.namespace}/{manifest['metadata']['name']} applied")
    return stored


async def _apply_all(cluster: Cluster, submission: Submission, options: SubmitOptions) -> list[Manifest]:
    """Apply all objects; then give the files their owners, which must exist first. Return them, the job last."""
    if submission.config_map:
        await _apply(cluster, submission.config_map, options)
    others = [await _apply(cluster, manifest, options) for manifest in submission.others]
    job = await _apply(cluster, submission.job, options)
    patch = build_owners_patch([job, *filter(_is_model, others)])
    files = [
        await cluster.patch(_RESOURCES[manifest["kind"]], manifest["metadata"]["name"], patch)
        for manifest in (submission.claim, submission.config_map)
        if manifest
    ]
    return [*files, *others, job]


async def _wait(cluster: Cluster, job: Manifest, options: SubmitOptions) -> str:
    """Report the job until it has ended, or with --follow its logs. Return its phase."""
    name, generation = job["metadata"]["name"], job["metadata"]["generation"]
    start, last = time.monotonic(), ""
    has_followed = not options.follow
    while True:
        job = await cluster.get_job(name)
        row = view_row(job, utc_now())
        # An earlier submission of the job may have ended; the operator has not seen this one yet.
        is_current = (job.get("status") or {}).get("observedGeneration", 0) >= generation
        if is_current and not has_followed:
            await follow_logs(cluster, Selection(name))
            has_followed = True
            continue
        line = _describe(row) if is_current else "not reconciled yet; is the operator running?"
        if line != last:
            options.say(f"[{time.monotonic() - start:4.0f}s] {line}")
            last = line
        if is_current and row.phase in FINAL_PHASES:
            return row.phase
        await asyncio.sleep(_POLL_SECONDS)


def _describe(row: JobRow) -> str:
    step = f"step {row.step}/{row.total_steps}" if row.step else ""
    reward = "" if row.reward is None else f"reward {row.reward:.3f}"
    return ": ".join(filter(None, [row.phase, "  ".join(filter(None, [step, reward])), row.waits_for]))
