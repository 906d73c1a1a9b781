"""The memory of all roles of a job, what does not fit, and what would."""

from dataclasses import replace

import pytest
from memory_plan.cases import QWEN25_7B, SMOLLM2_135M

from rljob_api.manifest.job import RLJob
from rljob_inputs.memory.plan import ModelFacts, Question, build_work, max_row_tokens, micro_batch_tokens, plan_memory
from rljob_inputs.models.defaults import resolve_job

GIB = 2**30
REWARD = {"name": "r", "function": {"inline": "def compute_score(**k): return 1.0"}}
USER = {"function": {"inline": "def respond(messages): return 'again'"}}
ON_GPUS = {
    "trainer": {"replicas": 1, "gpusPerReplica": 4, "gradientCheckpointing": "none"},
    "rollout": {"replicas": 2, "gpusPerReplica": 1, "sampling": {"maxTokens": 2048}},
}


def ask(config=QWEN25_7B, *, gpu_gib=None, prompt=None, models=None, **spec):
    spec = {"model": {"source": "/m"}, "data": {"train": {"source": "/d"}}, "rewards": [REWARD], **spec}
    job = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "j"}, "spec": spec}
    facts = {"/m": ModelFacts(config), **{source: ModelFacts(each) for source, each in (models or {}).items()}}
    resolved = resolve_job(RLJob.model_validate(job), None)
    return Question(resolved, facts, gpu_gib and int(gpu_gib * GIB), prompt)


def find(question, role, resource="host"):
    return next(need for need in plan_memory(question) if (need.role, need.resource) == (role, resource))


def part(need, name):
    return sum(each.num_bytes for each in need.peak.parts if each.name == name)


def test_every_role_has_a_need_per_pod_and_per_gpu():
    found = [(need.role, need.resource, need.count) for need in plan_memory(ask(**ON_GPUS))]
    assert found == [
        ("head", "host", 1),
        ("trainer", "gpu", 4),
        ("trainer", "host", 1),
        ("rollout", "gpu", 2),
        ("rollout", "host", 2),
        ("reward r", "host", 1),
    ]


@pytest.mark.parametrize(
    ("asynchronous", "trainer", "ranks_per_pod", "num_ranks"),
    [
        ("auto", {"replicas": 2, "gpusPerReplica": 4}, 4, 8),
        ("always", {"replicas": 2}, 1, 2),
        ("auto", {"replicas": 2}, 0, 2),
        ("never", {"replicas": 2, "gpusPerReplica": 4}, 0, 8),
    ],
)
def test_host_holds_a_copy_of_what_is_saved_next_to_training(asynchronous, trainer, ranks_per_pod, num_ranks):
    question = ask(trainer=trainer, checkpoint={"asynchronous": asynchronous})
    copy = part(find(question, "trainer"), "checkpoint copy")
    assert copy == 12 * 7_615_616_512 * ranks_per_pod // num_ranks


def test_without_a_known_gpu_nothing_is_said_to_fit():
    need = find(ask(**ON_GPUS), "trainer", "gpu")
    assert (need.available, need.fits, need.cannot_fit) == (None, None, False)


def test_labels_of_the_node_pool_are_the_gpu():
    pool = {"nodeSelector": {"nvidia.com/gpu.memory": "81559"}}
    trainer = {"gpusPerReplica": 4, "gradientCheckpointing": "none", "nodePool": pool}
    need = find(ask(trainer=trainer), "trainer", "gpu")
    assert need.available == 81559 * 2**20
    assert need.fits is False


def test_labels_of_the_whole_gpu_are_not_the_memory_of_a_slice():
    pool = {"nodeSelector": {"nvidia.com/gpu.memory": "81559"}, "gpuResource": "nvidia.com/mig-3g.40gb"}
    question = ask(trainer={"gpusPerReplica": 4, "nodePool": pool}, rollout={"gpusPerReplica": 1, "nodePool": pool})
    assert [find(question, role, "gpu").available for role in ("trainer", "rollout")] == [None, None]


def test_a_larger_gpu_keeps_the_weights_gathered():
    gathered = [part(find(ask(gpu_gib=gib, **ON_GPUS), "trainer", "gpu"), "gathered weights") for gib in (24, 80)]
    assert gathered[1] == 2 * 7_615_616_512 > 4 * gathered[0]


def test_what_depends_on_the_data_is_not_certain():
    need = find(ask(gpu_gib=80, **ON_GPUS), "trainer", "gpu")
    assert need.fits is False
    assert not need.cannot_fit, "with short texts it may run"
    assert find(ask(gpu_gib=22, **ON_GPUS), "trainer", "gpu").cannot_fit


def test_an_estimate_alone_refuses_nothing():
    need = find(ask(head={"resources": {"limits": {"memory": "512Mi"}}}), "head")
    assert need.fits is False
    assert not need.cannot_fit


@pytest.mark.parametrize(("gpus", "setting", "is_on"), [(4, "auto", True), (0, "auto", False), (4, "none", False)])
def test_activations_are_recomputed_on_gpus_unless_the_job_says_otherwise(gpus, setting, is_on):
    question = ask(trainer={"gpusPerReplica": gpus, "gradientCheckpointing": setting})
    need = find(question, "trainer", "gpu" if gpus else "host")
    layer = 2 * 3584
    activations = next(each.num_bytes for each in need.moments[0].parts if each.name == "activations")
    assert (activations < 2 * micro_batch_tokens(question) * 28 * layer) is is_on


def test_packed_rows_have_no_masks_but_copies_of_a_groups_keys():
    def work(attention, **trainer):
        question = ask(
            gpu_gib=80, prompt=1024, trainer={"gpusPerReplica": 1, "attention": attention, **trainer},
            rollout={"sampling": {"maxTokens": 1024}}, algorithm={"groupSize": 8},
        )  # fmt: skip
        return build_work(question, question.models["/m"].shape, question.gpu_bytes)

    for attention in ("auto", "packed"):
        packed = work(attention)
        assert not packed.has_masks
        # 8 rows of 2,048 tokens; 1,024 + 8 x 1,024 are computed.
        assert packed.key_copies == pytest.approx(8 * 2048 / 9216)
    assert work("auto", gpusPerReplica=0).has_masks, "on CPUs, auto is sdpa"
    assert (work("sdpa").has_masks, work("sdpa").key_copies) == (True, 1)
    assert (work("flash_attention_2").has_masks, work("flash_attention_2").key_copies) == (False, 1)


SHARED = {"placement": "trainer", "gpusPerReplica": 1, "maxModelLen": 1536}
ONE_GPU = {"gpusPerReplica": 1}


def test_a_rollout_needs_its_weights_and_one_text():
    rollout = {"gpusPerReplica": 1, "maxModelLen": 32768}
    question = ask(gpu_gib=18, rollout=rollout)
    need = find(question, "rollout", "gpu")
    assert part(need, "weights") == 2 * 7_615_616_512
    assert part(need, "KV cache: one text") == 32768 * 2 * 28 * 4 * 128 * 2
    assert need.available == int(0.9 * 18 * GIB)
    assert need.fits is False
    assert find(ask(gpu_gib=18, rollout=rollout | {"gpusPerReplica": 2}), "rollout", "gpu").fits is True


def test_a_shorter_text_may_be_enough_for_a_rollout():
    question = ask(gpu_gib=20, rollout={"gpusPerReplica": 1, "maxModelLen": 32768})
    need = find(question, "rollout", "gpu")
    assert need.fits is False
    shorter = ask(gpu_gib=20, rollout={"gpusPerReplica": 1, "maxModelLen": 4096})
    assert find(shorter, "rollout", "gpu").fits is True


def test_tensor_parallel_gpus_share_weights_and_heads():
    one, eight = (find(ask(rollout={"gpusPerReplica": gpus}), "rollout", "gpu") for gpus in (1, 8))
    assert part(one, "weights") == 8 * part(eight, "weights")
    assert part(one, "KV cache: one text") == 4 * part(eight, "KV cache: one text"), "4 heads of keys; each GPU has one"


@pytest.mark.parametrize(("limit", "fits"), [("1Gi", False), ("200Gi", True)])
def test_the_hosts_of_gpus_hold_slices_while_they_load_and_files_while_they_publish(limit, fits):
    trainer = ON_GPUS["trainer"] | {"resources": {"limits": {"memory": limit}}}
    need = find(ask(trainer=trainer), "trainer")
    sizes = {moment.name: {each.name: each.num_bytes for each in moment.parts} for moment in need.moments}
    assert sizes["load"]["load"] == 8 * (2 * 152064 * 3584 + 3584), "embeddings and head of four ranks"
    assert need.peak.name == "publish"
    assert need.fits is fits


@pytest.mark.parametrize(
    ("offload", "moved"), [("reference", {"reference": 2}), ("all", {"state": 12, "reference": 2, "gradients": 4})]
)
def test_offload_moves_the_parts_of_all_gpus_to_their_pod(offload, moved):
    """`moved`: bytes per parameter."""
    trainer, kl = {"replicas": 2, "gpusPerReplica": 4, "offload": offload}, {"kl": {"coefficient": 0.1}}
    question = ask(trainer=trainer, algorithm=kl)
    need, parameters = find(question, "trainer"), build_work(question, question.models["/m"].shape, None).shape
    update = next(moment for moment in need.moments if moment.name == "update")
    found = {each.name: each.num_bytes for each in update.parts if each.name in ("state", "reference", "gradients")}
    assert found == pytest.approx({name: size * parameters.num_parameters / 2 for name, size in moved.items()})
    on_gpu = {each.name for each in find(question, "trainer", "gpu").peak.parts}
    assert on_gpu.isdisjoint(set(moved) - {"gradients"}), "gradients pass through the GPU's buffers"


def test_offload_changes_nothing_without_gpus():
    plain, offloaded = (find(ask(SMOLLM2_135M, trainer={"offload": each}), "trainer") for each in ("none", "all"))
    assert plain == offloaded


def test_the_pod_of_rank_0_holds_three_files_while_it_publishes():
    need = find(ask(trainer={"replicas": 8, "gpusPerReplica": 1}), "trainer")
    publish = next(moment for moment in need.moments if moment.name == "publish")
    sizes = {each.name: each.num_bytes for each in publish.parts}
    assert sizes["scratch"] == 3 * 2 * 7_615_616_512
    embeddings = 2 * 152_064 * 3584
    assert sizes["published weights"] == embeddings + (256 << 20), "parameters are written one by one"


def test_published_adapters_are_small():
    lora = {"rank": 32, "publish": "adapter"}
    need = find(ask(**(ON_GPUS | {"trainer": {"gpusPerReplica": 4, "lora": lora}})), "rollout")
    assert part(need, "scratch") == 2 * 80_740_352


def test_a_rank_on_cpus_has_all_parts_in_its_pod():
    need = find(ask(SMOLLM2_135M, prompt=15, rollout={"sampling": {"maxTokens": 12}}), "trainer")
    assert need.peak.name == "update"
    assert {each.name for each in need.peak.parts} >= {"process", "state", "gradients", "activations", "scratch"}


def test_a_micro_batch_has_no_more_tokens_than_the_mini_batch():
    question = ask(SMOLLM2_135M, prompt=20, rollout={"sampling": {"maxTokens": 12}}, schedule={"promptsPerStep": 8})
    assert max_row_tokens(question) == 32
    assert micro_batch_tokens(question) == 8 * 8 * 32
    assert micro_batch_tokens(replace(question, max_prompt_tokens=9000)) == 16384


@pytest.mark.parametrize(
    ("spec", "prompt", "tokens"),
    [
        ({"rollout": {"maxModelLen": 4096}}, None, 4096),
        ({"rollout": {"maxModelLen": 4096}}, 100, 612),
        ({}, None, 1024),
        ({"data": {"train": {"source": "/d"}, "maxPromptTokens": 2000}}, None, 2512),
        ({"agent": {"type": "loop", "user": USER}}, 100, 2 * 8 * 512),
    ],
)
def test_rows_are_as_long_as_turns_and_the_rollout_allow(spec, prompt, tokens):
    assert max_row_tokens(ask(prompt=prompt, **spec)) == tokens


def test_a_given_conversation_is_as_long_as_the_rollouts_accept():
    sizes = {"rollout": {"maxModelLen": 4096, "sampling": {"maxTokens": 512}}}
    warm = {
        "data": {"train": {"source": "/d"}, "warmStart": {"source": "/given.jsonl"}},
        "schedule": {"warmStart": {"steps": 2}},
    }
    assert max_row_tokens(ask(prompt=100, **sizes)) == 612
    assert max_row_tokens(ask(prompt=100, **sizes, **warm)) == 4096


@pytest.mark.parametrize(
    ("role", "more", "tokens"),
    [
        ("rollout", {"rewards": [{"name": "t", "teacher": {"hint": "x"}, "use": "training"}]}, 8192),
        ("rollout", {"rewards": [REWARD]}, 0),
        ("reward t vllm", {"rewards": [{"name": "t", "teacher": {"model": {"source": "/m"}}}]}, 2048),
        (
            "reward t vllm",
            {"rewards": [{"name": "t", "teacher": {"model": {"source": "/m", "maxModelLen": 512}}}]},
            512,
        ),
    ],
)
def test_log_probs_of_prompts_are_counted_where_they_are_computed(role, more, tokens):
    """Each token of a pass has logits and log-probs of the vocabulary. On GPUs they take what vLLM does not reserve."""
    num_bytes = tokens * QWEN25_7B["vocab_size"] * 8
    assert part(find(ask(prompt=100, **more), role), "prompt log-probs") == num_bytes
    on_gpus = {"rollout": ON_GPUS["rollout"], "trainer": ON_GPUS["trainer"]}
    if "model" in (teacher := more["rewards"][0].get("teacher", {})):
        more = {"rewards": [{"name": "t", "teacher": {"model": {**teacher["model"], "gpusPerReplica": 1}}}]}
    for gib, fits in ((141, True), (60, tokens < 8192)):
        need = find(ask(prompt=100, gpu_gib=gib, **on_gpus, **more), role, "gpu")
        assert part(need, "prompt log-probs") == num_bytes
        assert need.fits is fits


def test_a_pass_of_the_rollouts_is_as_long_as_their_argument_says():
    rewards = [{"name": "t", "teacher": {"hint": "x"}, "use": "training"}]
    for given in (["--max-num-batched-tokens", "1024"], ["--max_num_batched_tokens=1024"]):
        need = find(ask(prompt=100, rewards=rewards, rollout={"extraArgs": given}), "rollout")
        assert part(need, "prompt log-probs") == 1024 * QWEN25_7B["vocab_size"] * 8


def test_a_served_model_is_planned_as_a_rollout_is():
    model = {"name": "j", "model": {"source": "/judge", "gpusPerReplica": 1}}
    needs = plan_memory(ask(rewards=[model], models={"/judge": SMOLLM2_135M}))
    assert [(need.role, need.resource) for need in needs][-3:] == [
        ("reward j", "host"), ("reward j vllm", "gpu"), ("reward j vllm", "host"),
    ]  # fmt: skip


def test_an_unknown_model_leaves_only_processes():
    need = find(ask({"model_type": "mamba"}), "trainer")
    assert [each.name for each in need.peak.parts] == ["processes"]
