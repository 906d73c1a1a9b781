"""Checks of a job's models and data before anything starts; what they read is what the trainer reads later.

Invariant: a check writes nothing but the Hub's cache, and answers within seconds: of large data it reads a sample.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from rljob_api.errors import RLJobError, TransientError, UserError
from rljob_api.manifest.job import RLJob, RLJobSpec
from rljob_api.manifest.job_sections import Data, DataSource, GivenSource
from rljob_api.manifest.roles import ALL_LINEAR, Lora
from rljob_api.manifest.services.models import ServedModel, TeacherModel
from rljob_api.manifest.sources import ChatTemplate, find_argument_problem
from rljob_api.phrases import did_you_mean, list_some
from rljob_inputs.data.columns import find_problems, read_answer
from rljob_inputs.data.lengths import PromptLimit, find_limit, measure
from rljob_inputs.data.prompts import build_prompt, render, tokenize, write_hint
from rljob_inputs.data.rows import Row, read_rows
from rljob_inputs.findings import Finding, InputError, LengthTable, describe_all_too_long, describe_too_long
from rljob_inputs.hub import HubAccess, MissingRevisionError, RefusedError
from rljob_inputs.models import config as configs
from rljob_inputs.models import tokenizer as tokenizers
from rljob_inputs.models.architectures import describe_untested, find_obstacles, text_config
from rljob_inputs.models.chat_problems import find_chat_problems, find_unread
from rljob_inputs.models.config import find_adapter_obstacle
from rljob_inputs.models.defaults import FromModel, OwnSettings, Resolved, resolve, resolve_job
from rljob_inputs.models.files import ModelFiles, describe_missing_config, open_model
from rljob_inputs.models.own_settings import read_own_settings
from rljob_inputs.models.weights import count_parameters, find_matrices, find_weight_problems
from rljob_inputs.objects.errors import RefusedObjectError
from rljob_inputs.objects.listing import has_objects
from rljob_inputs.prompts import Prompt

_QUANTIZATION_FILE = "hf_quant_config.json"
"""File of ModelOpt's checkpoints, whose config.json may not say that they are quantized."""
_WITHOUT_ADAPTERS = ("embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "word_embeddings", "embeddings")
_MAX_ROWS, _MAX_STREAMED_ROWS = 50_000, 1_000
"""Rows of a dataset that are checked: of files, and of a dataset of the Hub, which is streamed."""
_MAX_CHARACTERS = 50_000_000
"""About a second of reading, and a few hundred MiB."""
_MAX_MEASURED_ROWS, _MAX_MEASURED_CHARACTERS = 5_000, 8_000_000
"""About a second of work for a tokenizer."""
_TEXT = "Two times 21 is 42: def double(x): return 2 * x"
_ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
"""Roles of messages that chat templates know."""


@dataclass
class InputsReport:
    """What is known about a job's inputs. Fields are empty or None where the inputs cannot be read."""

    findings: list[Finding] = field(default_factory=list)
    lengths: list[LengthTable] = field(default_factory=list)
    num_parameters: dict[str, int] = field(default_factory=dict)
    """Parameters of each model, by the field of its source: spec.model.source, spec.rewards[0].model.source."""
    model_configs: dict[str, configs.Config] = field(default_factory=dict)
    """config.json of each model, by the same."""
    first_prompt: Prompt | None = None
    """The first training prompt, as a reward receives it. Without token ids."""
    resolved: Resolved | None = None
    """The job's spec with what it leaves to the model. None in reports of a part of the job."""

    @property
    def from_model(self) -> list[FromModel]:
        return self.resolved.from_model if self.resolved else []

    def resolve(self, job: RLJob) -> RLJob:
        """Return the job that was checked with what it leaves to the model."""
        return job.model_copy(update={"spec": self.resolved.spec}) if self.resolved else resolve_job(job, None)

    def add(self, path: str, message: str, *, is_warning: bool = False) -> None:
        self.findings.append(Finding(path, message, is_warning))

    def add_error(self, error: RLJobError, path: str) -> None:
        """Add an error of reading, at `path` unless it names its field."""
        is_transient, is_refused = (
            any(isinstance(cause, kind) for cause in (error, error.__cause__))
            for kind in (TransientError, (RefusedError, RefusedObjectError))
        )
        if isinstance(error, InputError):
            self.findings.append(Finding(error.path, error.message, False, is_transient, is_refused))
        else:
            self.findings.append(Finding(path, str(error), False, is_transient, is_refused))


@dataclass(frozen=True)
class _Model:
    files: ModelFiles
    own: OwnSettings
    tokenizer: tokenizers.LightTokenizer | None

    @property
    def config(self) -> configs.Config:
        return self.own.config


def check_inputs(
    job: RLJob,
    locate: Callable[[str], str | None],
    environment: Mapping[str, str] = os.environ,
    *,
    runs_here: bool = True,
    reads_rows: bool = True,
) -> InputsReport:
    """Check all models and datasets of a job; with `reads_rows` false, which needs no library for data, no datasets.

    `locate` returns where this process finds a source: a path, hf://org/name or s3://bucket/path; None skips the
    source. `environment` may have the variables of Hub and storage; the job's own settings take precedence. With
    `runs_here` false, the job runs on machines that may reach others with other rights, so what is refused is a
    warning.
    """
    report = _check_all(job, locate, find_access(job, environment), reads_rows)
    if not runs_here:
        report.findings = [
            replace(found, is_warning=found.is_warning or found.is_transient or found.is_refused)
            for found in report.findings
        ]
    elif (token := job.spec.hub.token_secret_ref) and not environment.get(token.key):
        message = f"refers to a cluster's Secret, which ${token.key} replaces on this machine; set that variable"
        report.add("spec.hub.tokenSecretRef.key", message)
    return report


def _check_all(job: RLJob, locate: Callable[[str], str | None], access: HubAccess, reads_rows: bool) -> InputsReport:
    sources = _data_sources(job.spec) if reads_rows else []
    with ThreadPoolExecutor() as pool:  # each may wait for the Hub
        served = [
            pool.submit(_check_served_model, model, path, locate(model.source), access)
            for path, model in job.spec.served_models.items()
        ]
        data = {
            path: pool.submit(_read_sample, source, locate(source.source), split, access, path)
            for path, source, split in sources
        }
        report, model = _check_trained_model(job, locate(job.spec.model.source), access)
    for (path, served_model), future in zip(job.spec.served_models.items(), served, strict=True):
        found, opened = future.result()
        _merge(report, found)
        if isinstance(served_model, TeacherModel):
            _check_teacher(report, path, opened, model)
    # Only the job itself writes to the storage for its files; here it is listed.
    try:
        if job.copy_url:
            has_objects(job.copy_url, access.objects)
    except RLJobError as error:
        report.add_error(error, "spec.checkpoint.storage")
    report.resolved = resolve(job.spec, model.own if model else None)
    rollout, is_renderable = job.spec.rollout, not find_argument_problem(job.spec.data.chat_template_arguments)
    tokenizer = model.tokenizer if model and is_renderable else None
    overridden = configs.overrides_length(rollout.extra_args, rollout.env)
    context_length = configs.find_context_length(model.config) if model and not overridden else None
    held_out = {each.data_path: each for each in report.resolved.spec.held_out_sets}
    for path, source, split in sources:
        is_given = isinstance(source, GivenSource)
        limit = find_limit(report.resolved.spec, held_out.get(path), context_length, is_given=is_given)
        _merge(report, _check_data(job.spec.data, source, path, split, data[path].result(), tokenizer, limit))
    if all(found.is_warning for found in report.findings):
        samples = [(*each, data[each[0]].result()) for each in sources]
        _check_held_out(report, job.spec.data, samples)
        _check_teachers(report, job.spec, model, tokenizer, samples)
    return report


def _check_teachers(
    report: InputsReport,
    spec: RLJobSpec,
    model: _Model | None,
    tokenizer: tokenizers.LightTokenizer | None,
    sources: list[tuple[str, DataSource, str, _Sample | None]],
) -> None:
    """Warn of a teacher whose `when` matches no row: it would teach nothing. Find hints that cannot be written."""
    prompts = [
        build_prompt(source, row, "", [], split, path)
        for path, source, split, sample in sources
        if sample and split == "train" and not isinstance(source, GivenSource)
        for row in sample.rows
    ]
    for index, reward in enumerate(spec.rewards):
        path = f"spec.rewards[{index}].teacher"
        text = reward.hint
        if not reward.teacher or not prompts or reward.use == "evaluation":
            continue
        taught = [prompt for prompt in prompts if reward.scores_row(prompt.extra_info, prompt.data_source)]
        if not taught:
            known = sorted({"data_source"}.union(*(prompt.extra_info for prompt in prompts)))
            unknown = [name for name in reward.teacher.when if name not in known]
            problem = f"matches none of {len(prompts)} training rows, so this teacher teaches nothing"
            hint = did_you_mean(unknown[0], known, f"it has {list_some(known, 10)}") if unknown else ""
            remedy = f"no row has a column {unknown[0]}; {hint}" if unknown else "correct the values"
            report.add(f"{path}.when", f"{problem}: {remedy}", is_warning=True)
        if text is None:
            continue
        try:
            for prompt in taught[:_MAX_STREAMED_ROWS] if tokenizer else ():
                write_hint(spec.data, text, prompt, tokenizer, f"{path}.hint")
        except InputError as error:
            report.add_error(error, path)


def _check_held_out(
    report: InputsReport, data: Data, sources: list[tuple[str, DataSource, str, _Sample | None]]
) -> None:
    """Warn of prompts that are both trained and held out: the model's figures are then not about new ones."""
    prompts = {
        path: {str(render(data, source, row, path)): row for row in sample.rows}
        for path, source, _, sample in sources
        if sample is not None
    }
    trained = {
        text: row for path, _, split, _ in sources if split == "train" for text, row in prompts.get(path, {}).items()
    }
    for path, _, split, _ in sources:
        held_out = prompts.get(path, {})
        both = [text for text in held_out if text in trained]
        if split != "train" and both:
            places = f"{held_out[both[0]].place} is {trained[both[0]].place} of the training data"
            message = (
                f"{len(both)} of {len(held_out)} prompts are trained, too, so its figures are not of new prompts: "
            )
            report.add(path, f"{message}{places}; hold out other rows", is_warning=True)


def find_access(job: RLJob, environment: Mapping[str, str]) -> HubAccess:
    """Return the Hub and the object storage of the job's head, which all roles share unless their env differs."""
    hub, storage = job.spec.hub, job.spec.object_storage
    settings = {"HF_ENDPOINT": hub.endpoint} if hub.endpoint else {}
    if hub.token_secret_ref and (token := environment.get(hub.token_secret_ref.key)):
        settings["HF_TOKEN"] = token
    settings |= {"AWS_ENDPOINT_URL_S3": storage.endpoint} if storage.endpoint else {}
    settings |= {"AWS_REGION": storage.region} if storage.region else {}
    return HubAccess.from_environment({**environment, **settings, **job.spec.head.env})


def _data_sources(spec: RLJobSpec) -> list[tuple[str, DataSource, str]]:
    sources: list[tuple[str, DataSource, str]] = [(each.path, each.source, "train") for each in spec.data.train_sources]
    return [*sources, *((each.data_path, each.data, "test") for each in spec.held_out_sets)]


def _merge(report: InputsReport, other: InputsReport) -> None:
    known = {(finding.path, finding.message) for finding in report.findings}
    report.findings += [finding for finding in other.findings if (finding.path, finding.message) not in known]
    report.lengths += other.lengths
    report.num_parameters |= other.num_parameters
    report.model_configs |= other.model_configs
    report.first_prompt = report.first_prompt or other.first_prompt


def _check_trained_model(job: RLJob, location: str | None, access: HubAccess) -> tuple[InputsReport, _Model | None]:
    spec, report = job.spec, InputsReport()
    model = _open(report, "spec.model", location, spec.model.revision, access, spec.model.chat_template)
    if model is None:
        return report, None
    if not spec.model.trust_remote_code:  # its code may do anything
        for problem in find_obstacles(model.config):
            report.add("spec.model.source", f"{model.files.place} {problem}")
        if _QUANTIZATION_FILE in model.files.sizes:
            problem = f"has {_QUANTIZATION_FILE}, so its weights are quantized, which cannot be trained"
            report.add("spec.model.source", f"{model.files.place} {problem}; use the model in bfloat16")
        if remark := describe_untested(model.config):
            report.add("spec.model.source", f"{model.files.place} {remark}", is_warning=True)
    on_cpus = spec.rollout.gpus_per_replica == 0
    if problem := configs.find_dtype_problem(model.config, spec.trainer.dtype, on_cpus=on_cpus):
        report.add("spec.trainer.dtype", problem)
    if on_cpus and (problem := configs.find_device_problem(model.config)):
        report.add("spec.rollout.gpusPerReplica", problem)
    if not configs.overrides_length(spec.rollout.extra_args, spec.rollout.env):
        _check_length(report, "spec.rollout.maxModelLen", model.config, spec.rollout.max_model_len)
        context, given = configs.find_context_length(model.config), spec.rollout.sampling.max_tokens
        if spec.rollout.max_model_len is None and context and given is not None and given >= context:
            message = f"leaves no room for a prompt in the model's context of {context} tokens; lower it"
            report.add("spec.rollout.sampling.maxTokens", message)
    if spec.trainer.lora is not None:
        _check_lora(report, spec, spec.trainer.lora, model)
    report.findings += find_chat_problems(spec, model.own)
    vocabulary = text_config(model.config).get("vocab_size")
    if model.tokenizer and isinstance(vocabulary, int) and len(model.tokenizer) > vocabulary:
        message = f"{model.files.place}: the tokenizer has {len(model.tokenizer)} tokens, the model only {vocabulary}"
        report.add("spec.model.source", f"{message}; the tokenizer may belong to another model", is_warning=True)
    return report, model


def _check_lora(report: InputsReport, spec: RLJobSpec, lora: Lora, model: _Model) -> None:
    files = model.files
    if obstacle := find_adapter_obstacle(spec, model.config):
        if lora.publish == "adapter":
            report.add("spec.trainer.lora.publish", f"is adapter, and {obstacle}; remove it, or set merged")
        elif lora.publish == "auto":
            loss = "which loses a part of the update in 16 bits (merged_share)"
            message = f"rollouts get merged weights, {loss}, because {obstacle}"
            report.add("spec.trainer.lora.publish", message, is_warning=True)
    path, matrices = "spec.trainer.lora.targetModules", find_matrices(files)
    existing = sorted(matrices.difference(_WITHOUT_ADAPTERS))
    if excluded := [name for name in lora.target_modules if name in matrices and name in _WITHOUT_ADAPTERS]:
        message = f"has {', '.join(excluded)}: embeddings and the head cannot have an adapter; set some of"
        report.add(path, f"{message} {', '.join(existing)}")
    missing = [name for name in lora.target_modules if name != ALL_LINEAR and name not in matrices]
    if existing and missing:
        # A warning: some architectures give their modules other names than their files do.
        hint = did_you_mean(missing[0], existing, f"it has {', '.join(existing)}")
        report.add(path, f"{files.place} has no module called {', '.join(missing)}; {hint}", is_warning=True)


def _check_served_model(
    model: ServedModel, path: str, location: str | None, access: HubAccess
) -> tuple[InputsReport, _Model | None]:
    report = InputsReport()
    opened = _open(report, path, location, model.revision, access)
    if opened is not None and not configs.overrides_length(model.extra_args, {}):
        _check_length(report, f"{path}.maxModelLen", opened.config, model.max_model_len)
    if opened is not None:
        report.findings += find_unread(f"{path}.chatTemplateArguments", model.chat_template_arguments, opened.own)
    return report, opened


def _check_teacher(report: InputsReport, path: str, teacher: _Model | None, policy: _Model | None) -> None:
    known = [each.tokenizer for each in (policy, teacher) if each and each.tokenizer]
    if teacher and len(known) == 2:
        ids = known[0]([_TEXT])["input_ids"][0]
        own, other = (tokenizer.decode(ids, skip_special_tokens=True) for tokenizer in known)
        if own.split() != other.split():
            message = f"{teacher.files.place} reads the policy's token ids of {own!r} as {other!r}"
            report.add(f"{path}.source", f"{message}; use a model with the policy's tokenizer")


def _check_length(report: InputsReport, path: str, config: configs.Config, max_model_len: int | None) -> None:
    if max_model_len is not None and (problem := configs.find_length_problem(config, max_model_len)):
        report.add(path, problem)


def _open(
    report: InputsReport,
    path: str,
    location: str | None,
    revision: str | None,
    access: HubAccess,
    template: ChatTemplate | None = None,
) -> _Model | None:
    """Return the model at `location`; None, with findings, if it cannot be used at all."""
    if location is None:
        return None
    source = f"{path}.source"
    try:
        files = open_model(location, revision, access)
    except RLJobError as error:
        report.add_error(error, f"{path}.revision" if isinstance(error, MissingRevisionError) else source)
        return None
    if "config.json" not in files.sizes:
        remedy = describe_missing_config(files)
        report.add(source, f"{files.place} is not a Hugging Face model: config.json is missing; {remedy}")
        return None
    try:
        own = read_own_settings(files, template)
        tokenizer = tokenizers.load_tokenizer(files, template.inline if template else None)
    except UserError as error:
        report.add_error(error, source)
        return None
    config = own.config
    if not config.get("model_type"):
        report.add(source, f"{files.place}/config.json has no model_type")
    if not files.sizes.keys() & set(tokenizers.FILES):
        report.add(source, f"{files.place} has no tokenizer (tokenizer.json)")
    for problem in find_weight_problems(files):
        report.add(source, problem)
    report.model_configs[source] = config
    report.num_parameters[source] = count_parameters(files, config.get("dtype") or config.get("torch_dtype"))
    return _Model(files, own, tokenizer)


@dataclass(frozen=True)
class _Sample:
    rows: list[Row]
    is_whole: bool
    error: RLJobError | None = None
    """Why reading ended."""


def _read_sample(source: DataSource, location: str | None, split: str, access: HubAccess, path: str) -> _Sample | None:
    if location is None:
        return None
    limit = _MAX_STREAMED_ROWS if "://" in location else _MAX_ROWS
    rows: list[Row] = []
    num_characters = 0
    try:
        for row in read_rows(source, location, split=split, access=access, is_check=True, field=path):
            if len(rows) == limit or num_characters > _MAX_CHARACTERS:
                return _Sample(rows, is_whole=False)
            rows.append(row)
            num_characters += len(str(row.values))
    except RLJobError as error:
        return _Sample(rows, is_whole=False, error=error)
    return _Sample(rows, is_whole=True)


def _check_data(
    data: Data,
    source: DataSource,
    path: str,
    split: str,
    sample: _Sample | None,
    tokenizer: tokenizers.LightTokenizer | None,
    limit: PromptLimit,
) -> InputsReport:
    report = InputsReport()
    if sample is None:
        return report
    if sample.error is not None:
        report.add_error(sample.error, f"{path}.source")
    elif not sample.rows:
        report.add(f"{path}.source", f"{source.source} has no rows")
    problems: dict[str, InputError] = {}
    for row in sample.rows:
        for problem in find_problems(data, source, row, path):
            problems.setdefault(problem.path, problem)
    for problem in problems.values():
        report.add(problem.path, problem.message)
    if report.findings or not sample.rows:
        return report
    _check_answers(report, source, path, sample.rows)
    _check_prompts(report, data, source, path, sample.rows)
    if split == "train":
        report.first_prompt = build_prompt(
            source, sample.rows[0], render(data, source, sample.rows[0], path), [], split, path
        )
    if tokenizer is not None:
        try:
            _measure_prompts(report, data, source, path, sample, tokenizer, limit)
        except InputError as error:
            report.add_error(error, path)
    return report


def _check_answers(report: InputsReport, source: DataSource, path: str, rows: list[Row]) -> None:
    if source.answer is None:
        return
    null = [row for row in rows if read_answer(source, row, path) is None]
    if null:
        message = f"{null[0].place}: the answer is null, in {len(null)} of {len(rows)} rows; rewards receive None"
        report.add(f"{path}.answer", message, is_warning=True)


def _check_prompts(report: InputsReport, data: Data, source: DataSource, path: str, rows: list[Row]) -> None:
    """Warn of what a chat template renders without an error: nothing to answer, and a role that no model has seen."""
    if data.format == "text":
        return  # a prompt without tokens is an error
    rendered = [(row, render(data, source, row, path)) for row in rows]
    chats = [(row, messages) for row, messages in rendered if not isinstance(messages, str)]
    empty = [row for row, messages in chats if not str(messages[-1].get("content") or "").strip()]
    roles = [(row, str(message.get("role"))) for row, messages in chats for message in messages]
    unknown = [(row, name) for row, name in roles if name not in _ROLES]
    problems = []
    if empty:
        problems.append(f"{empty[0].place}: the prompt is empty, in {len(empty)} of {len(rows)} rows")
    if unknown:
        row, name = unknown[0]
        hint = did_you_mean(name, _ROLES, f"usual are {', '.join(_ROLES)}")
        problems.append(f"{row.place}: a message has the role {name}; {hint}")
    if problems:
        report.add(f"{path}.prompt", "; ".join(problems), is_warning=True)


def _measure_prompts(
    report: InputsReport,
    data: Data,
    source: DataSource,
    path: str,
    sample: _Sample,
    tokenizer: tokenizers.LightTokenizer,
    limit: PromptLimit,
) -> None:
    rows = sample.rows[:: max(1, -(-len(sample.rows) // _MAX_MEASURED_ROWS))]  # at even distances
    rendered: list[Any] = []
    num_characters = 0
    for row in rows:
        if num_characters > _MAX_MEASURED_CHARACTERS:
            break
        prompt = render(data, source, row, path)
        given = read_answer(source, row, path) if isinstance(source, GivenSource) else []
        text = "".join(str(message["content"]) for message in given)
        rendered.append(prompt + text if isinstance(prompt, str) else [*prompt, *given])
        num_characters += len(str(rendered[-1]))
    tokens = tokenize(data, rendered, tokenizer)
    if empty := [row for row, token_ids in zip(rows, tokens, strict=False) if not token_ids]:
        raise InputError("spec.data.template", f"{empty[0].place}: the prompt is empty after rendering")
    table = measure([len(token_ids) for token_ids in tokens], path, len(sample.rows), limit, is_whole=sample.is_whole)
    report.lengths.append(table)
    if limit.num_tokens is not None and limit.num_tokens < 1:
        return  # the manifest or the model's context is wrong, and reported there
    if table.num_too_long == table.num_measured:
        is_sample = not sample.is_whole or table.num_measured < table.num_rows
        report.add(f"{path}.source", describe_all_too_long(table), is_warning=is_sample)
    elif table.num_too_long:
        report.add(f"{path}.source", describe_too_long(table), is_warning=True)
