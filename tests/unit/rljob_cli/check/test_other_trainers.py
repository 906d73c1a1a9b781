"""`rljob init --from FILE`: settings of verl, prime-rl and TRL become fields; others are listed with a reason."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from typer.testing import CliRunner

from rljob_cli.check import other_trainers, peer_settings
from rljob_cli.check.jobfile import load, load_partial
from rljob_cli.check.other_trainers import translate
from rljob_cli.main import app
from tests.paths import ROOT

VERL = """
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
data:
  train_files: [gsm8k/train.jsonl, math/train.jsonl]
  val_files: gsm8k/test.jsonl
  train_batch_size: 16
  max_prompt_length: 1024
  max_response_length: 2048
  filter_overlong_prompts: true
  truncation: error
  apply_chat_template_kwargs: {enable_thinking: false}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B, enable_gradient_checkpointing: true, lora_rank: 0, lora_alpha: 16}
  actor:
    ppo_mini_batch_size: 8
    clip_ratio: 0.3
    use_kl_loss: true
    kl_loss_type: low_var_kl
    optim: {lr: 1e-6, total_training_steps: "${trainer.total_training_steps}"}
    fsdp_config: {param_offload: true, optimizer_offload: true}
  rollout: {n: 4, top_k: -1, top_p: 0.9, tensor_model_parallel_size: 4}
reward: {custom_reward_function: {path: my/reward.py, name: score, reward_kwargs: {bonus: 0.1}}}
trainer: {total_epochs: 3, nnodes: 2, save_freq: -1, v1: {trainer_mode: sync}}
"""
PRIME = """
max_steps = 20
seq_len = 2048
[deployment]
num_train_gpus = 1
num_infer_gpus = 4
[model]
name = "org/small"
[orchestrator]
batch_size = 128
group_size = 16
[orchestrator.train.sampling]
max_completion_tokens = 128
[[orchestrator.train.source]]
name = "first"
[orchestrator.train.source.env.taskset]
id = "squares"
difficulty = "hard"
[[orchestrator.train.source]]
name = "second"
[orchestrator.renderer]
name = "own"
[trainer.model.ac]
freq = 1
[ckpt]
[inference.vllm]
tensor_parallel_size = 2
"""
TRL = """
import missing_package
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import think_format_reward

MODEL = "Qwen/Qwen3-0.6B"
raise SystemExit("a file that is read does not run")


def exact_reward(completions, answer, **kwargs):
    return [float(a == b) for a, b in zip(completions, answer)]


dataset = load_dataset("openai/gsm8k", "main", split="train")
args = GRPOConfig(
    learning_rate=2e-6, per_device_train_batch_size=4, gradient_accumulation_steps=8, steps_per_generation=16,
    max_steps=100, loss_type="dr_grpo", scale_rewards="none", beta=compute(), reward_weights=[1.0, 0.2], run_name="r",
)
peft = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj"])
trainer = GRPOTrainer(
    model=MODEL, reward_funcs=[exact_reward, think_format_reward], train_dataset=dataset, args=args, peft_config=peft
)
"""


@pytest.fixture
def convert(tmp_path, monkeypatch):
    """Return a function that writes a file and returns the job's spec and the reasons by setting."""
    monkeypatch.chdir(tmp_path)

    def run(name, text):
        (tmp_path / name).write_text(text)
        done = CliRunner().invoke(app, ["init", "job", "--from", name, "-o", "json"])
        assert done.exit_code == 0, done.output
        left = {each["setting"]: each["why"] for each in json.loads(done.stdout)["left"]}
        return load(tmp_path / "job" / "rljob.yaml").job.spec, left

    return run


def test_configuration_of_verl_becomes_a_job(convert, tmp_path):
    for name, count in (("gsm8k", 6), ("math", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text('{"prompt": "a"}\n' * count)
    spec, left = convert("verl.yaml", VERL)
    assert (spec.model.source, spec.trainer.gradient_checkpointing) == ("hf://Qwen/Qwen3-8B", "full")
    assert [(each.source.source, each.source.weight) for each in spec.data.train_sources] == [
        (str(tmp_path / "gsm8k/train.jsonl"), 6),
        (str(tmp_path / "math/train.jsonl"), 2),
    ]
    assert spec.data.train.answer == "reward_model.ground_truth"
    assert [each.data.source for each in spec.evaluation.sets] == [str(tmp_path / "gsm8k/test.jsonl")]
    assert spec.data.chat_template_arguments == {"enable_thinking": False}
    assert (spec.schedule.prompts_per_step, spec.schedule.mini_batches, spec.schedule.steps) == (16, 2, 3 * 8 // 16)
    assert spec.schedule.type == "synchronous"
    assert (spec.algorithm.group_size, spec.algorithm.optimizer.weight_decay) == (4, 0.01)
    assert (spec.algorithm.loss.clip_low, spec.algorithm.loss.clip_high) == (0.3, 0.3)
    assert (spec.algorithm.kl.coefficient, spec.algorithm.kl.estimator) == (0.001, "k3")
    assert (spec.rollout.max_model_len, spec.data.max_prompt_tokens) == (3072, 1024)
    assert (spec.rollout.placement, spec.rollout.gpus_per_replica) == ("trainer", 4)
    assert (spec.trainer.replicas, spec.trainer.gpus_per_replica, spec.trainer.offload) == (2, 8, "all")
    assert spec.trainer.lora is None
    [reward] = spec.rewards
    assert (reward.function.file, reward.function.entrypoint) == (str(tmp_path / "my/reward.py"), "score")
    assert reward.function.kwargs == {"bonus": 0.1}
    assert "trainer.total_epochs" not in left
    assert "never cut" in left["data.truncation"]
    assert "must be 1" in left["actor_rollout_ref.rollout.top_p"], "what the types refuse is listed with their message"
    assert spec.checkpoint.every_steps == 1000000, "-1 saves no step, and a last checkpoint is always written"
    assert "computed by the script; set it" in left["actor_rollout_ref.actor.optim.total_training_steps"]


def test_epochs_over_rows_that_are_not_here_are_listed(convert):
    spec, left = convert("verl.yaml", VERL)
    assert "schedule.steps" in left["trainer.total_epochs"]
    assert spec.data.mix[0].weight == 1.0


def test_setting_of_a_part_that_the_types_refuse_is_left_out(convert):
    spec, left = convert("verl.yaml", VERL.replace("{adv_estimator: grpo,", "{adv_estimator: grpo, lam: 0.9,"))
    assert spec.algorithm.gae.decay == 1
    assert "is for type ppo alone" in left["algorithm.lam"]


def test_configuration_of_prime_rl_becomes_a_job(convert):
    spec, left = convert("rl.toml", PRIME)
    assert (spec.schedule.type, spec.schedule.max_staleness, spec.schedule.steps) == ("bounded", 8, 20)
    assert (spec.schedule.prompts_per_step, spec.algorithm.group_size, spec.algorithm.type) == (8, 16, "drGrpo")
    assert (spec.rollout.replicas, spec.rollout.gpus_per_replica, spec.rollout.max_model_len) == (2, 2, 2048)
    assert (spec.trainer.gradient_checkpointing, spec.trainer.micro_batch_tokens) == ("full", 2048)
    environment = spec.agent.environment
    assert (environment.id, environment.packages) == ("squares", ["verifiers==0.4.0", "squares"])
    assert environment.args == {"taskset": {"difficulty": "hard"}}
    assert spec.data.train.source == "env://train"
    assert left.keys() == {"orchestrator.train.source", "orchestrator.renderer.name"}


EARLIER = """
[model]
name = "org/small"
[wandb]
project = "words"
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.sampling]
max_tokens = 100
temperature = 0.7
[[orchestrator.env]]
id = "org/reverse-text"
args = {lines = 3}
"""
BETWEEN = EARLIER.replace("orchestrator.sampling]\nmax_tokens", "orchestrator.train.sampling]\nmax_completion_tokens")
BETWEEN = BETWEEN.replace("orchestrator.env", "orchestrator.train.env")


@pytest.mark.parametrize(
    ("text", "args"),
    [
        (EARLIER, {}),
        (BETWEEN, {}),
        (BETWEEN.replace("rollouts_per_example", "group_size"), {}),
        (BETWEEN.replace("rollouts_per_example = 16", "").replace("args =", "group_size = 16\nargs ="), {}),
        (BETWEEN.replace("rollouts_per_example = 16", "[orchestrator.train]\ngroup_size = 16"), {}),
        (
            BETWEEN.replace('id = "org/reverse-text"', 'taskset = {id = "reverse-text", hard = true}'),
            {"taskset": {"hard": True}},
        ),
    ],
)
def test_earlier_files_of_prime_rl_are_read(convert, text, args):
    spec, left = convert("rl.toml", text)
    assert (spec.agent.environment.id, spec.agent.environment.args) == ("reverse-text", args)
    assert (spec.schedule.prompts_per_step, spec.algorithm.group_size) == (8, 16)
    assert (spec.rollout.sampling.max_tokens, spec.rollout.sampling.temperature) == (100, 0.7)
    assert spec.tracking.wandb_project == "words"
    assert [why for why in left.values() if "before 0.4" not in why] == []


TRL_WITH = """
from graders import exact
from mine.other import style as styled
NAME = "Qwen/Qwen3-0.6B"
options = {"beta": 0.04, "seed": 7}
def own(completions, **kwargs):
    model = "not the trainer's"
    return [1.0]
def read_rows(split="train"):
    rows = load_dataset("gsm8k", "main", split="train")
    return rows
funcs = [own]
funcs.append(exact)
funcs += [lambda completions, **kwargs: [0.0]]
if NAME:
    funcs.append(styled)
args = GRPOConfig("out", max_steps=40, warmup_ratio=0.1, max_prompt_length=99, scale_rewards=False, **options, **load())
args.beta = 0.1
if NAME:
    args.epsilon = 0.3
def main():
    test = load_dataset("gsm8k", "main", split="test")
    trainer = GRPOTrainer(NAME, funcs, args, read_rows(), test)
"""


def test_script_of_trl_has_positional_arguments_names_and_later_changes(convert, tmp_path):
    (tmp_path / "graders.py").write_text("")
    spec, left = convert("train.py", TRL_WITH)
    assert spec.model.source == "hf://Qwen/Qwen3-0.6B"
    train, held_out = spec.data.train, spec.data.eval
    assert (train.source, train.subset, train.split) == ("hf://gsm8k", "main", "train")
    assert (held_out.source, held_out.subset, held_out.split) == ("hf://gsm8k", "main", "test")
    found = [(each.function.file, each.function.entrypoint) for each in spec.rewards]
    assert found == [(str(tmp_path / "train.py"), "own"), (str(tmp_path / "graders.py"), "exact")]
    assert (spec.algorithm.kl.coefficient, spec.schedule.seed) == (0.1, 7)
    assert (spec.algorithm.optimizer.warmup_steps, spec.data.max_prompt_tokens) == (4, 99)
    assert spec.algorithm.advantages.normalization == "none"
    assert {"reward_funcs.2", "reward_funcs.3", "epsilon", "**load()"} < left.keys(), "what is not read is listed"


def test_model_from_a_call_and_a_file_without_a_trainer_are_read(convert, tmp_path):
    made = 'model, tokenizer = FastModel.from_pretrained(model_name="org/name")\n'
    rest = 'config = GRPOConfig(max_steps=20)\nrows = load_dataset("json", data_files="rows.jsonl")\n'
    rest += "def own(completions, **kwargs):\n    return [1.0]\n"
    spec, _ = convert("train.py", made + rest + "GRPOTrainer(model, own, config, rows)\n")
    assert (spec.model.source, spec.schedule.steps) == ("hf://org/name", 20)
    assert spec.data.train.source == str(tmp_path / "rows.jsonl")
    (tmp_path / "job" / "rljob.yaml").unlink()
    (tmp_path / "train.py").write_text('print("a = b")\na = b = 3\n' + rest)
    assert CliRunner().invoke(app, ["init", "job", "--from", "train.py"]).exit_code == 0
    spec = load_partial(tmp_path / "job" / "rljob.yaml").job.spec
    assert (spec.schedule.steps, spec.data.train.source) == (20, str(tmp_path / "rows.jsonl"))


OWN_TRAINER = """
class LoudGRPOTrainer(GRPOTrainer):
    def log(self, logs):
        self.step = 1
def own(completions, **kwargs):
    return [1.0]
def other(NAME="not/this"):
    config = GRPOConfig(max_steps=7)
    def inner():
        return 3
    return config
NAME = "org/small"
config = GRPOConfig(max_steps=40, per_device_train_batch_size=16)
def load():
    config = other()
    return config
trainer = LoudGRPOTrainer(model=NAME, reward_funcs=own, args=config)
"""


def test_names_of_functions_end_with_them_and_other_statements_are_no_calls(convert):
    """A trainer of one's own stands in a class statement, which is no expression."""
    spec, left = convert("train.py", OWN_TRAINER)
    assert (spec.model.source, spec.schedule.steps, spec.schedule.prompts_per_step) == ("hf://org/small", 40, 2)
    assert [each.name for each in spec.rewards] == ["own"]
    assert left == {"per_device_train_batch_size": "near: `schedule.promptsPerStep` (of one process)"}
    (Path("job") / "rljob.yaml").unlink()
    spec, _ = convert("train.py", OWN_TRAINER.replace("args=config", "args=load()"))
    assert spec.schedule.steps == 7


@pytest.mark.parametrize("changed", ["args=read()", "args=GRPOConfig(**read())", "args=GRPOConfig(num_generations=n)"])
def test_defaults_stand_for_nothing_that_the_script_computes(convert, changed):
    """TRL's defaults tell nothing of what comes from a command line."""
    source = (
        "def own(completions, **kwargs):\n    return [1.0]\nGRPOTrainer(model='org/small', reward_funcs=own, args=X)"
    )
    spec, left = convert("train.py", source.replace("args=X", changed))
    assert spec.algorithm.model_fields_set.isdisjoint({"group_size"})
    assert "prompts_per_step" not in spec.schedule.model_fields_set
    [why] = left.values()
    assert why.startswith("computed by the script; set it; ")


def test_asynchronous_trainer_has_its_own_gpus(convert):
    source = "def own(completions, **kwargs):\n    return [1.0]\nAsyncGRPOTrainer('org/small', own)"
    spec, left = convert("train.py", source)
    assert (spec.schedule.type, spec.rollout.placement, left) == ("bounded", "separate", {})


def test_lists_that_a_file_leaves_empty_are_not_written(convert, tmp_path):
    convert("verl.yaml", "data: {train_files: a.parquet, train_batch_size: 8}")
    text = (tmp_path / "job" / "rljob.yaml").read_text()
    assert "mix" not in text
    assert "sets" not in text


def test_second_file_is_refused(tmp_path):
    done = CliRunner().invoke(app, ["init", str(tmp_path / "job"), "--from", "a.toml", "--from", "b.toml"])
    assert (done.exit_code, "one file" in done.output) == (2, True)


def test_script_of_trl_is_read_and_not_run(convert, tmp_path):
    spec, left = convert("train.py", TRL)
    assert (spec.model.source, spec.data.train.source) == ("hf://Qwen/Qwen3-0.6B", "hf://openai/gsm8k")
    assert (spec.data.train.subset, spec.data.train.split) == ("main", "train")
    first, second = spec.rewards
    assert (first.function.file, first.function.entrypoint) == (str(tmp_path / "train.py"), "exact_reward")
    assert (second.function.module, second.weight) == ("trl.rewards", 0.2)
    assert (spec.schedule.prompts_per_step, spec.schedule.mini_batches, spec.schedule.steps) == (8, 2, 50)
    assert (spec.algorithm.type, spec.algorithm.loss.level) == ("drGrpo", "constant")
    assert (spec.algorithm.advantages.normalization, spec.algorithm.optimizer.schedule) == ("none", "linear")
    assert (spec.trainer.lora.rank, spec.trainer.lora.target_modules) == (8, ["q_proj"])
    assert (spec.rollout.sampling.max_tokens, spec.rollout.placement) == (512, "trainer")
    assert left["beta"].startswith("computed by the script; set it; near: `algorithm.kl.coefficient`")
    assert "metadata.name" in left["run_name"]


def test_people_read_what_has_no_counterpart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rl.toml").write_text(PRIME)
    lines = CliRunner().invoke(app, ["init", "job", "--from", "rl.toml"]).stdout.splitlines()
    assert lines[0].endswith("settings of prime-rl; without a counterpart:")
    assert any(line.startswith("  orchestrator.renderer.name = own: the model's own chat template") for line in lines)
    assert lines[-1] == "next: rljob validate job/rljob.yaml"
    again = CliRunner().invoke(app, ["init", "job", "--from", "rl.toml"])
    assert (again.exit_code, again.stderr) == (2, "job/rljob.yaml exists; choose another folder\n")


def test_other_options_are_refused(tmp_path):
    done = CliRunner().invoke(app, ["init", str(tmp_path / "job"), "--from", "rl.toml", "--model", "hf://org/name"])
    assert done.exit_code == 2
    assert "leave out the other options" in done.output


def test_file_without_known_settings_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compose.yaml").write_text("services: {a: {image: b}}")
    done = CliRunner().invoke(app, ["init", "job", "--from", "compose.yaml"])
    assert done.exit_code == 2
    assert "compose.yaml has no setting of verl, TRL, prime-rl" in done.stderr
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "max_steps ="), ("a.yaml", "a: ]"), ("a.py", "def"), ("a.sh", "")]
)
def test_file_that_cannot_be_read_is_named(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(other_trainers.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="", stderr=""))
    (tmp_path / name).write_text(text)
    done = CliRunner().invoke(app, ["init", "job", "--from", name])
    assert (done.exit_code, done.stderr.startswith(name)) == (2, True)


def test_the_tables_are_those_of_the_page():
    assert (ROOT / "docs" / "coming-from.md").read_text() == peer_settings._PAGE


def test_functions_of_the_packages_are_those_of_the_page():
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", peer_settings._PAGE, re.S))
    shown = [reward["function"] for block in blocks for reward in block.get("rewards", []) if "function" in reward]
    assert yaml.safe_load(other_trainers._OF_VERL) in shown
    assert yaml.safe_load(other_trainers._OF_TRL) | {"entrypoint": "accuracy_reward"} in shown


CELLS = [
    (peer, ours, theirs)
    for peer in other_trainers._ALWAYS
    for ours, theirs in peer_settings.read_table(peer)
    if other_trainers._CELL.fullmatch(theirs)
]


def test_most_of_each_table_is_computed():
    assert {peer: sum(each[0] == peer for each in CELLS) >= 25 for peer in other_trainers._ALWAYS} == {
        "verl": True,
        "TRL": True,
        "prime-rl": True,
    }


@pytest.mark.parametrize(("peer", "ours", "theirs"), CELLS)
def test_each_computed_cell_sets_its_field(tmp_path, peer, ours, theirs):
    """With a value that the cell names, or 2, alone: the field is set, or its type refuses the 2."""
    values = re.split(", ", other_trainers._CELL.fullmatch(theirs)[2] or "")
    assert values == [""] or len(values) <= len(ours.rpartition(": ")[2].split(", ")), "each value has ours"
    names = re.findall(r"`([^`]+)`", theirs)
    given = (
        "org/name" if "source" in ours else [2] if "[]" in ours else 2 if values == [""] else yaml.safe_load(values[0])
    )
    _, left = translate(dict.fromkeys(names, 2) | {"rows": 8, names[0]: given}, peer, tmp_path, "train.py")
    why = {name: reason for name, _, reason in left}
    told = ("spec.", "(of one process)")
    assert all(names[0] not in name or any(each in reason for each in told) for name, reason in why.items()), why
