"""The rules between the sections of an RLJob. What may not change is in `immutable_fields`.

A rule exists twice, in Python and in CEL. CEL rules are written as if each field with a default were set: the generator
of the CRDs puts the defaults in.

What shares the trainer's devices are rollouts and served models with placement trainer.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from rljob_api.manifest.algorithm import Algorithm
from rljob_api.manifest.base import Rule, different_names
from rljob_api.manifest.evaluation import SHORT_FORM, list_greedy
from rljob_api.manifest.job_spec import JobSpec
from rljob_api.manifest.roles import SHARED_GPU as ROLLOUT_GPU
from rljob_api.manifest.roles import NodePool, Resources, RolloutRole
from rljob_api.manifest.schedule import ALTERNATING
from rljob_api.manifest.services.models import SHARED_GPU
from rljob_api.manifest.services.runner import RUNNER_SERVICE
from rljob_api.manifest.services.user import USER_SERVICE

SEPARATE: Final = "self.rollout.placement == 'separate'"
"""CEL: whether the rollouts have Pods of their own."""
_MIN_SHARE: Final = round(1 - ROLLOUT_GPU + 0.01, 2)
"""Null of the rollouts, with the remainder of the ranks."""
_MODEL_SHARE: Final = f"has(m.gpuMemoryUtilization) ? m.gpuMemoryUtilization : {SHARED_GPU}"


def _divides_trainer(spec: JobSpec) -> bool:
    return _divides(spec.trainer.gpus_per_replica, spec.rollout.gpus_per_replica)


def _divides(trainer: int, engine: int) -> bool:
    return trainer > 0 and trainer % engine == 0 if engine else trainer == 0


def _leave_out(field: str, is_left_out: Callable[[RolloutRole], bool], cel: str) -> Rule:
    """The rule that a field of the rollouts' Pods is left out if they have no Pods. `cel` is over the rollouts."""
    return Rule(
        (f"rollout.{field}", "rollout.placement"),
        "must be left out with rollout.placement trainer: the rollouts run in the trainer's Pods",
        f"set trainer.{field}, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or is_left_out(spec.rollout),
        f"{SEPARATE} || ({cel})",
    )


def _find_misplaced(spec: JobSpec) -> str:
    return ", ".join(f"{path}.placement" for path in spec.models_in_trainer)


def _models_divide_trainer(spec: JobSpec) -> bool:
    gpus = {model.gpus_per_replica for model in spec.models_in_trainer.values()}
    return all(_divides(spec.trainer.gpus_per_replica, each) for each in gpus)


def _shares_fit(spec: JobSpec) -> bool:
    share = spec.rollout.gpu_memory_utilization or _MIN_SHARE
    return not (spec.trainer.gpus_per_replica and spec.shares_trainer) or share + spec.models_gpu_share <= 1


def _map_shared(value: str) -> str:
    """CEL: `value` of each served model m with placement trainer, as one list."""
    user, has_user = "self.agent.user.model.model", "has(self.agent.user) && has(self.agent.user.model)"
    chats = {f"r.{kind}.model": f"has(r.{kind}) && has(r.{kind}.model)" for kind in ("judge", "teacher")}
    of_rewards = (
        f"self.rewards.map(r, {has_model} && {model}.placement == 'trainer', {value.replace('m.', f'{model}.')})"
        for model, has_model in {"r.model": "has(r.model)", **chats}.items()
    )
    return (
        f"{' + '.join(of_rewards)} + "
        f"({has_user} && has({user}) && {user}.placement == 'trainer' ? [{value.replace('m.', f'{user}.')}] : [])"
    )


SHARED_DEVICES: Final = (
    Rule(
        ("schedule.type", "rollout.placement"),
        f"must be {' or '.join(ALTERNATING)} with rollout.placement trainer: rollouts and trainer alternate",
        "set schedule.type, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or spec.schedule.type in ALTERNATING,
        f"{SEPARATE} || self.schedule.type in {list(ALTERNATING)}",
    ),
    Rule(
        ("rollout.replicas", "rollout.placement"),
        "must be 1 (its default) with rollout.placement trainer: their number follows from the trainer's Pods and GPUs",
        "remove it, and set trainer.replicas, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or spec.rollout.replicas == 1,
        f"{SEPARATE} || self.rollout.replicas == 1",
    ),
    Rule(
        ("rollout.weightTransfer", "rollout.placement"),
        "must be auto or file unless rollout.placement is trainer: other rollouts share no devices with it",
        "remove it, or set rollout.placement: trainer",
        lambda spec: spec.shares_trainer or spec.rollout.weight_transfer != "device",
        f"!({SEPARATE}) || self.rollout.weightTransfer != 'device'",
    ),
    Rule(
        ("rollout.gpusPerReplica", "trainer.gpusPerReplica", "rollout.placement"),
        "must be a divisor of trainer.gpusPerReplica with rollout.placement trainer, or 0 if that is 0",
        "change either, or remove rollout.placement",
        lambda spec: not spec.shares_trainer or _divides_trainer(spec),
        f"{SEPARATE} || (self.rollout.gpusPerReplica == 0 ? self.trainer.gpusPerReplica == 0 : "
        "self.trainer.gpusPerReplica > 0 && self.trainer.gpusPerReplica % self.rollout.gpusPerReplica == 0)",
    ),
    Rule(
        ("rewards", "agent.user", "rollout.placement"),
        "must have no model with placement trainer unless rollout.placement is trainer, too",
        "set rollout.placement: trainer, or remove the model's placement",
        lambda spec: spec.shares_trainer or not spec.models_in_trainer,
        f"!({SEPARATE}) || ({_map_shared('true')}).size() == 0",
        _find_misplaced,
    ),
    Rule(
        ("rewards", "agent.user", "trainer.gpusPerReplica"),
        "must have a divisor of trainer.gpusPerReplica as gpusPerReplica of each model with placement trainer, or 0 if "
        "that is 0",
        "change either, or remove the model's placement",
        _models_divide_trainer,
        f"({_map_shared('m.gpusPerReplica')}).all(gpus, gpus == 0 ? self.trainer.gpusPerReplica == 0 : "
        "self.trainer.gpusPerReplica > 0 && self.trainer.gpusPerReplica % gpus == 0)",
    ),
    Rule(
        ("rollout.gpuMemoryUtilization", "rewards", "agent.user"),
        "plus that of all models with placement trainer must be at most 1: they are awake at the same time",
        "lower either; null is 0.8 less that of the models",
        _shares_fit,
        f"self.trainer.gpusPerReplica == 0 || {SEPARATE} || ([has(self.rollout.gpuMemoryUtilization) ? "
        f"self.rollout.gpuMemoryUtilization : {_MIN_SHARE}] + {_map_shared(_MODEL_SHARE)}).sum() <= 1.0",
    ),
    _leave_out("image", lambda rollout: rollout.image is None, "!has(self.rollout.image)"),
    _leave_out(
        "resources",
        lambda rollout: rollout.resources == Resources(),
        "self.rollout.resources.requests.size() == 0 && self.rollout.resources.limits.size() == 0",
    ),
    _leave_out(
        "nodePool",
        lambda rollout: rollout.node_pool == NodePool(),
        "self.rollout.nodePool.nodeSelector.size() == 0 && self.rollout.nodePool.tolerations.size() == 0 && "
        f"!self.rollout.nodePool.exclusive && self.rollout.nodePool.gpuResource == '{NodePool().gpu_resource}' && "
        "!has(self.rollout.nodePool.topology)",
    ),
    _leave_out("env", lambda rollout: not rollout.env, "self.rollout.env.size() == 0"),
)


def _divides_over_ranks(spec: JobSpec) -> bool:
    prompts, remainder = divmod(spec.schedule.prompts_per_step, spec.schedule.mini_batches)
    # A batch that does not divide into mini-batches is reported once, by its own rule.
    return remainder > 0 or prompts * spec.algorithm.group_size % spec.trainer.num_ranks == 0


def _prompt_and_completion_fit(spec: JobSpec) -> bool:
    limit, prompt = spec.rollout.max_model_len, spec.data.max_prompt_tokens
    return limit is None or (prompt or 1) + (spec.rollout.sampling.max_tokens or 1) <= limit


def _evaluation_fits(spec: JobSpec) -> bool:
    limit = spec.rollout.max_model_len
    given = [spec.evaluation.sampling, *(each.sampling for each in spec.evaluation.sets)]
    return limit is None or all(sampling is None or (sampling.max_tokens or 1) < limit for sampling in given)


def _find_wrong_rewards(spec: JobSpec) -> str:
    """`exat in evaluation.sets[0]`: names of sets that no reward of evaluation has."""
    known = {reward.name for reward in spec.rewards if reward.use != "training"}
    sets = enumerate(spec.evaluation.sets)
    wrong = [f"{name} in sets[{index}]" for index, each in sets for name in each.rewards or () if name not in known]
    return ", ".join(wrong)


def _has_rows(spec: JobSpec) -> bool:
    runner = spec.agent.runner
    return spec.agent.type == "environment" or (spec.agent.type == "program" and bool(runner and runner.function))


def _has_no_episodes(spec: JobSpec) -> bool:
    """Whether the job has nothing that is for episodes of its own."""
    kinds = spec.agent.type == "singleTurn" and spec.algorithm.type == Algorithm().type
    return kinds and spec.trains and not (spec.rewards or spec.evaluation.sets or spec.shares_trainer)


def _names_set(spec: JobSpec) -> bool:
    best = spec.evaluation.best
    return best is None or best.set in {each.name for each in spec.held_out_sets}


def _reports_best(spec: JobSpec) -> bool:
    best = spec.evaluation.best
    found = next((each for each in spec.held_out_sets if best and each.name == best.set), None)
    if best is None or found is None:
        return True  # an unknown set is reported by its own rule
    if best.metric == "majority":
        return found.samples_per_prompt > 1
    return best.metric == "accuracy" or int(best.metric.removeprefix("pass@")) in found.pass_at


_HOSTED: Final = "self.agent.type == 'environment' || self.agent.type == 'program'"

_ANY_ENV: Final = (
    "(has(self.data.train) && self.data.train.source.startsWith('env://')) || "
    "(has(self.data.mix) && self.data.mix.exists(m, m.source.startsWith('env://'))) || "
    "(has(self.data.eval) && self.data.eval.source.startsWith('env://')) || "
    "self.evaluation.sets.exists(s, s.data.source.startsWith('env://'))"
)
_TRAINS_PROMPTS: Final = "self.?data.?train.hasValue()"
_GREEDY: Final = "(has({0}.sampling) && {0}.sampling.temperature == 0.0)"

_RULES: Final = (
    Rule(
        ("data", "service"),
        "must be set if service is not, and left out if it is: clients of a service bring the data",
        "set one of the two",
        lambda spec: (spec.given_data is None) != (spec.service is None),
        "has(self.data) != has(self.service)",
    ),
    Rule(
        ("service", "data.train", "agent.type", "algorithm.type", "rollout.placement", "task"),
        "must not be set, nor data.train be left out, with rewards, evaluation.sets, task evaluate, or another "
        "agent.type, algorithm.type or rollout.placement than the default: the job has no episodes",
        "remove what is for episodes",
        lambda spec: spec.data.given_train is not None or _has_no_episodes(spec),
        f"{_TRAINS_PROMPTS} || self.rewards.size() == 0 && self.evaluation.sets.size() == 0 && "
        "self.task == 'train' && self.agent.type == 'singleTurn' && "
        f"self.algorithm.type == '{Algorithm().type}' && {SEPARATE}",
    ),
    Rule(
        ("schedule.miniBatches", "schedule.promptsPerStep"),
        "must divide schedule.promptsPerStep",
        "change either",
        lambda spec: spec.schedule.prompts_per_step % spec.schedule.mini_batches == 0,
        "self.schedule.promptsPerStep % self.schedule.miniBatches == 0",
    ),
    Rule(
        (
            "schedule.promptsPerStep",
            "schedule.miniBatches",
            "algorithm.groupSize",
            "trainer.replicas",
            "trainer.gpusPerReplica",
        ),
        "x algorithm.groupSize / schedule.miniBatches must be divisible by the number of trainer ranks",
        "change the batch, or trainer.replicas and trainer.gpusPerReplica",
        _divides_over_ranks,
        "self.schedule.promptsPerStep % self.schedule.miniBatches != 0 || "
        "self.schedule.promptsPerStep / self.schedule.miniBatches * self.algorithm.groupSize % "
        "(self.trainer.replicas * (self.trainer.gpusPerReplica > 0 ? self.trainer.gpusPerReplica : 1)) == 0",
    ),
    different_names("rewards"),
    Rule(
        ("agent.tools", "rewards"),
        "must have names that no reward has: both are services of the job",
        "rename one of them",
        lambda spec: not {tool.name for tool in spec.agent.tools} & {reward.name for reward in spec.rewards},
        "!has(self.agent.tools) || !self.agent.tools.exists(tool, self.rewards.exists(r, r.name == tool.name))",
        lambda spec: ", ".join(sorted({t.name for t in spec.agent.tools} & {r.name for r in spec.rewards})),
    ),
    Rule(
        ("rewards", "agent.user"),
        f"must not be named {USER_SERVICE}, which is the service of agent.user",
        "choose another name",
        lambda spec: spec.agent.user is None or all(reward.name != USER_SERVICE for reward in spec.rewards),
        f"!has(self.agent.user) || self.rewards.all(reward, reward.name != '{USER_SERVICE}')",
        lambda spec: ", ".join(f"rewards[{i}]" for i, r in enumerate(spec.rewards) if r.name == USER_SERVICE),
    ),
    Rule(
        ("rewards", "agent.runner"),
        f"must not be named {RUNNER_SERVICE}, which is the service of agent.runner",
        "choose another name",
        lambda spec: not spec.agent.is_hosted or all(reward.name != RUNNER_SERVICE for reward in spec.rewards),
        f"!({_HOSTED}) || self.rewards.all(reward, reward.name != '{RUNNER_SERVICE}')",
        lambda spec: ", ".join(f"rewards[{i}]" for i, r in enumerate(spec.rewards) if r.name == RUNNER_SERVICE),
    ),
    Rule(
        ("data.format", "agent.type"),
        "must be chat unless agent.type is singleTurn: turns are chat messages",
        "set data.format: chat",
        lambda spec: spec.agent.type == "singleTurn" or spec.data.format == "chat",
        "self.agent.type == 'singleTurn' || self.data.format == 'chat'",
    ),
    Rule(
        ("data.warmStart", "schedule.warmStart"),
        "must be set together: one names the conversations, the other how many steps train on them",
        "set both, or remove both",
        lambda spec: (spec.data.warm_start is None) == (spec.schedule.warm_start is None),
        "has(self.data.warmStart) == has(self.schedule.warmStart)",
    ),
    Rule(
        ("schedule.steps", "data.train"),
        "must be warmStart.steps without data.train: others have no prompts",
        "set either",
        lambda spec: bool(spec.data.given_train) or spec.schedule.steps == spec.schedule.num_warm_steps,
        "has(self.data.train) || !has(self.schedule.warmStart) || self.schedule.steps == self.schedule.warmStart.steps",
    ),
    Rule(
        ("data", "agent.type"),
        "must have env:// only with agent.type environment, or program with runner.function: no others have rows",
        "name a file or hf://org/name, or change the agent",
        lambda spec: not spec.env_sources or _has_rows(spec),
        f"!({_ANY_ENV}) || self.agent.type == 'environment' || "
        "(self.agent.type == 'program' && has(self.agent.runner) && has(self.agent.runner.function))",
        lambda spec: ", ".join(f"{path.removeprefix('spec.')}.source" for path in spec.env_sources),
    ),
    Rule(
        ("rewards",),
        "must have at least one entry: only agents of type environment and program reward an episode themselves",
        "add a reward",
        lambda spec: bool(spec.rewards or spec.service) or spec.agent.is_hosted or spec.data.given_train is None,
        f"self.rewards.size() > 0 || has(self.service) || !{_TRAINS_PROMPTS} || {_HOSTED}",
    ),
    Rule(
        ("rewards",),
        "must have one that training uses",
        "remove use: evaluation from one",
        lambda spec: not spec.rewards or bool(spec.training_rewards) or spec.agent.is_hosted,
        f"self.rewards.size() == 0 || self.rewards.exists(reward, reward.use != 'evaluation') || {_HOSTED}",
    ),
    Rule(
        ("rewards", "data.eval", "evaluation.sets"),
        "must have one that evaluation uses: otherwise every answer to a held-out prompt counts as 0",
        "remove use: training from one, or add one with use: evaluation",
        lambda spec: (
            not spec.rewards
            or any(reward.use != "training" for reward in spec.rewards)
            or spec.agent.is_hosted
            or not spec.held_out_sets
        ),
        "self.rewards.size() == 0 || self.rewards.exists(reward, reward.use != 'training') || "
        f"{_HOSTED} || (!has(self.data.eval) && self.evaluation.sets.size() == 0)",
    ),
    Rule(
        ("rewards", "agent.rewardWeight"),
        "must have a weight other than 0: otherwise every score is 0 and the model learns nothing",
        "set rewards[].weight",
        lambda spec: (
            any(reward.weight != 0 for reward in spec.training_rewards)
            or (spec.agent.is_hosted and spec.agent.reward_weight != 0)
            or (not spec.training_rewards and not spec.agent.is_hosted)  # reported by its own rule
        ),
        "self.rewards.exists(reward, reward.weight != 0.0 && reward.use != 'evaluation') || "
        f"(({_HOSTED}) ? self.agent.rewardWeight != 0.0 : self.rewards.all(reward, reward.use == 'evaluation'))",
    ),
    Rule(
        ("rollout.sampling.temperature", "rewards"),
        "must be 1 with a teacher, whose log-probs are those of temperature 1",
        "remove it",
        lambda spec: spec.rollout.sampling.temperature == 1 or not any(reward.teacher for reward in spec.rewards),
        "self.rollout.sampling.temperature == 1.0 || !self.rewards.exists(reward, has(reward.teacher))",
    ),
    Rule(
        ("rollout.replicas", "suspend"),
        "must be at least 1 unless the job is suspended",
        "set it to 1 or more, or suspend: true",
        lambda spec: (
            spec.suspend or spec.rollout.replicas > 0 or (spec.service is None and spec.data.given_train is None)
        ),
        f"self.suspend || self.rollout.replicas > 0 || !has(self.service) && !{_TRAINS_PROMPTS}",
    ),
    Rule(
        ("rewards",),
        "must have at least 1 replica each unless the job is suspended",
        "set replicas to 1 or more, or autoscaling with minReplicas 0, or suspend: true",
        lambda spec: spec.suspend or all(r.http or r.autoscaling or r.replicas > 0 for r in spec.rewards),
        "self.suspend || self.rewards.all(reward, has(reward.http) || has(reward.autoscaling) || reward.replicas > 0)",
        lambda spec: "0 for " + ", ".join(r.name for r in spec.rewards if not (r.http or r.autoscaling or r.replicas)),
    ),
    *SHARED_DEVICES,
    Rule(
        ("rollout.sampling.maxTokens", "rollout.maxModelLen", "data.maxPromptTokens"),
        "must leave room for the prompt in rollout.maxModelLen",
        "raise rollout.maxModelLen, or lower maxTokens or data.maxPromptTokens",
        _prompt_and_completion_fit,
        "!has(self.rollout.maxModelLen) || "
        "(has(self.rollout.sampling.maxTokens) ? self.rollout.sampling.maxTokens : 1) + "
        "(has(self.data.maxPromptTokens) ? self.data.maxPromptTokens : 1) <= self.rollout.maxModelLen",
    ),
    Rule(
        ("evaluation.sampling.maxTokens", "rollout.maxModelLen"),
        "must leave room for the prompt in rollout.maxModelLen",
        "raise rollout.maxModelLen, or lower maxTokens",
        _evaluation_fits,
        "!has(self.rollout.maxModelLen) || ((!has(self.evaluation.sampling) || "
        "!has(self.evaluation.sampling.maxTokens) || "
        "self.evaluation.sampling.maxTokens < self.rollout.maxModelLen) && self.evaluation.sets.all(s, "
        "!has(s.sampling) || !has(s.sampling.maxTokens) || s.sampling.maxTokens < self.rollout.maxModelLen))",
    ),
    Rule(
        ("rollout.sampling.temperature",),
        "must be more than 0 for training: greedy trajectories of a prompt are identical",
        "set it to 1; evaluation.sampling may be greedy",
        lambda spec: spec.rollout.sampling.temperature > 0,
        "self.rollout.sampling.temperature > 0.0",
    ),
    Rule(
        ("rollout.extraArgs", "trainer.headDtype"),
        "must have head_dtype in --hf-overrides with headDtype float32, since it replaces RLJob's own argument",
        'add "head_dtype": "float32" to it',
        lambda spec: (
            spec.trainer.head_dtype == "model"
            or not any(each.startswith(("--hf-overrides", "--hf_overrides")) for each in spec.rollout.extra_args)
            or any("head_dtype" in each for each in spec.rollout.extra_args)
        ),
        "self.trainer.headDtype == 'model' || !self.rollout.extraArgs.exists(a, a.startsWith('--hf-overrides') || "
        "a.startsWith('--hf_overrides')) || self.rollout.extraArgs.exists(a, a.contains('head_dtype'))",
    ),
    Rule(
        ("data.eval", "evaluation.sets", "task"),
        "or evaluation.sets must be set with task evaluate",
        "add the prompts to evaluate on, or remove task",
        lambda spec: spec.trains or bool(spec.held_out_sets),
        "self.task == 'train' || has(self.data.eval) || self.evaluation.sets.size() > 0",
    ),
    Rule(
        ("rollout.placement", "task"),
        "must be separate with task evaluate, which has no trainer",
        "remove rollout.placement, or task",
        lambda spec: spec.trains or not spec.shares_trainer,
        f"self.task == 'train' || {SEPARATE}",
    ),
    Rule(
        ("evaluation.everySteps", "data.eval"),
        "must be 0 without data.eval and evaluation.sets",
        "add data.eval, or remove everySteps",
        lambda spec: spec.evaluation.every_steps == 0 or bool(spec.held_out_sets),
        "self.evaluation.everySteps == 0 || has(self.data.eval) || self.evaluation.sets.size() > 0",
    ),
    Rule(
        ("evaluation.sets", "data.eval"),
        f"must not have an entry named {SHORT_FORM}: that is the set of data.eval",
        "rename it, or remove data.eval",
        lambda spec: spec.data.eval is None or all(each.name != SHORT_FORM for each in spec.evaluation.sets),
        f"!has(self.data.eval) || self.evaluation.sets.all(s, s.name != '{SHORT_FORM}')",
        lambda spec: ", ".join(f"sets[{i}]" for i, e in enumerate(spec.evaluation.sets) if e.name == SHORT_FORM),
    ),
    Rule(
        ("evaluation.sets", "rewards"),
        "must have as rewards the names of rewards without use: training",
        "correct the names, or remove use from the reward",
        lambda spec: not _find_wrong_rewards(spec),
        "self.evaluation.sets.all(s, !has(s.rewards) || "
        "s.rewards.all(name, self.rewards.exists(r, r.name == name && r.use != 'training')))",
        _find_wrong_rewards,
    ),
    Rule(
        ("evaluation", "evaluation.sampling"),
        "must have a temperature of more than 0 with several samples per prompt: greedy answers are identical",
        "raise sampling.temperature, or set samplesPerPrompt: 1",
        lambda spec: not list_greedy(spec.evaluation),
        f"!({_GREEDY.format('self.evaluation')} && self.evaluation.samplesPerPrompt > 1) && "
        "self.evaluation.sets.all(s, "
        "(has(s.samplesPerPrompt) ? s.samplesPerPrompt : self.evaluation.samplesPerPrompt) == 1 || "
        f"!(has(s.sampling) ? s.sampling.temperature == 0.0 : {_GREEDY.format('self.evaluation')}))",
        lambda spec: ", ".join(list_greedy(spec.evaluation)),
    ),
    Rule(
        ("evaluation.best.set",),
        "must be the name of an evaluation set",
        f"use a name of evaluation.sets, or {SHORT_FORM} for data.eval",
        _names_set,
        "!has(self.evaluation.best) || self.evaluation.sets.exists(s, s.name == self.evaluation.best.set) || "
        f"has(self.data.eval) && self.evaluation.best.set == '{SHORT_FORM}'",
    ),
    Rule(
        ("evaluation.best.metric",),
        "must be a number that its set reports: accuracy; or, with several samples per prompt, majority or a pass@K of "
        "passAt",
        "use accuracy, or change samplesPerPrompt or passAt of the set",
        _reports_best,
        # Only whether it has several samples: to compare each k exceeds the cost that the API server allows.
        "!has(self.evaluation.best) || self.evaluation.best.metric == 'accuracy' || has(self.evaluation.passAt) || "
        "self.evaluation.samplesPerPrompt > 1 || self.evaluation.sets.exists(s, "
        "s.name == self.evaluation.best.set && (has(s.passAt) || has(s.samplesPerPrompt) && s.samplesPerPrompt > 1))",
    ),
    Rule(
        ("checkpoint.exportPolicy", "evaluation.best"),
        "must not be best without evaluation.best",
        "set evaluation.best, or use last",
        lambda spec: spec.checkpoint.exported_steps != "best" or spec.evaluation.best is not None,
        "!has(self.checkpoint.exportPolicy) || self.checkpoint.exportPolicy != 'best' || has(self.evaluation.best)",
    ),
)


def _of_data(rule: Rule) -> Rule:
    """Return the rule for jobs that have data."""
    cel = f"!has(self.data) || ({rule.cel})" if rule.cel else ""
    return replace(rule, holds=lambda spec: spec.given_data is None or rule.holds(spec), cel=cel)


RULES: Final = tuple(
    _of_data(rule) if "self.data." in rule.cel or rule.fields[0].startswith("schedule.") else rule for rule in _RULES
)
