"""Sessions, models, samplers and checkpoints: what a client may do, and the error otherwise."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from rljob_api.errors import TransientError
from rljob_api.wire.driver_status import SERVING, DriverStatus
from rljob_trainer.tinker import slot
from rljob_trainer.tinker.journal import Journal
from rljob_trainer.tinker.service import Service, UnknownError
from rljob_trainer.tinker.wire import ModelLimits, RefusedError

NAME = "org/model"


def make(folder: Path) -> None:
    folder.mkdir()


class Group:
    """Records what the ranks are asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.holds: list[tuple[str, str, list[str]]] = []
        self.error: Exception | None = None
        self.norm = 0.5
        self.has_ended = False

    async def call(self, function: Any, *arguments: Any) -> list[Any]:
        if self.error is not None:
            raise self.error
        if function is slot.hold:
            self.holds.append(arguments)  # type: ignore[arg-type]
            return [None]
        self.calls.append((function.__name__, *arguments))
        if function is slot.write_adapter:
            make(arguments[0])
        return [(self.norm, len(self.calls))]

    async def call_with_rows(self, function: Any, rows: Any, facts: Any, *arguments: Any) -> Any:
        self.calls.append((function.__name__, *arguments))
        return [np.zeros(len(row.token_ids), np.float32) for row in rows], [1.0, 2.0]

    async def save(self, folder: Path) -> None:
        make(folder)
        self.calls.append(("save", folder.name))

    async def saved(self) -> None: ...

    async def wait_until_ended(self, _: float) -> None:
        await asyncio.Event().wait()


class Samples:
    def __init__(self) -> None:
        self.adapters: list[Path | None] = []

    async def sample(self, adapter: Path | None, asked: Any) -> bytes:
        self.adapters.append(adapter)
        return b"samples"


class Bench:
    def __init__(self, root: Path, group: Group | None = None, max_rank: int = 16, max_adapters: int = 8) -> None:
        self.now, self.group, self.samples = 0.0, group or Group(), Samples()
        self.journal = Journal(root / "journal.sqlite", f"{NAME} {max_rank}")
        self.service = Service(
            self.journal,
            name=NAME,
            tokenizer=NAME,
            limits=ModelLimits(8, 100),
            max_rank=max_rank,
            max_adapters=max_adapters,
            root=root,
            clock=lambda: self.now,
        )
        self.service._ranks = self.group, self.samples  # type: ignore[assignment]

    def session(self, client: str = "ann") -> str:
        request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38")
        return str(self.service.create_session(client, request)["session_id"])

    def heartbeat(self, client: str, session: str) -> None:
        self.service.session_heartbeat(client, types.SessionHeartbeatRequest(session_id=session))

    async def result(self, answer: dict[str, Any], client: str = "ann") -> Any:
        found = await self.service.retrieve(client, answer["request_id"], 5.0)
        assert found is not None
        return found

    async def create(self, session: str, client: str = "ann", number: int = 0, rank: int = 4, **fields: Any) -> Any:
        lora = types.LoraConfig(**{"rank": rank, "seed": 1, **fields})
        request = types.CreateModelRequest(session_id=session, model_seq_id=number, base_model=NAME, lora_config=lora)
        return await self.result(self.service.create_model(client, request), client)

    async def model(self, client: str = "ann") -> str:
        return str((await self.create(self.session(client), client))["model_id"])

    def step(self, model: str, number: int, client: str = "ann") -> dict[str, Any]:
        request = types.OptimStepRequest(
            optim_params=types.AdamParams(learning_rate=0.5), model_id=model, seq_id=number
        )
        return self.service.optim_step(client, request)

    def save(self, model: str, number: int, name: str | None, **fields: Any) -> dict[str, Any]:
        request = types.SaveWeightsRequest(model_id=model, path=name, seq_id=number, **fields)
        return self.service.save_weights("ann", request)

    def save_for_sampler(self, model: str, number: int, **fields: Any) -> dict[str, Any]:
        request = types.SaveWeightsForSamplerRequest(model_id=model, seq_id=number, **fields)
        return self.service.save_weights_for_sampler("ann", request)

    def sampler(self, session: str, **fields: Any) -> str:
        request = types.CreateSamplingSessionRequest(session_id=session, sampling_session_seq_id=9, **fields)
        return str(self.service.create_sampling_session("ann", request)["sampling_session_id"])


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture
def single(tmp_path):
    """A service that is full with one model."""
    return Bench(tmp_path, max_adapters=1)


async def test_the_status_says_whom_the_service_serves(bench):
    await bench.model("ann")
    status = DriverStatus(phase=SERVING)
    assert bench.service.describe(status).waits_for == "1 client, 1 adapter, 0 busy"
    await bench.model("bob")
    bench.session("bob")
    assert bench.service.describe(status).waits_for == "2 clients, 2 adapters, 0 busy"
    bench.now = 1000.0
    assert bench.service.describe(status).waits_for == "0 clients, 2 adapters, 0 busy"
    assert bench.service.describe(DriverStatus(waits_for="the hub")).waits_for == "the hub"


async def test_a_model_is_trained_by_commands_whose_retries_are_applied_once(bench):
    model = await bench.model()
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2]), loss_fn_inputs={"target_tokens": [2, 3]})
    given = types.ForwardBackwardInput(data=[datum], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id=model, seq_id=1)
    body = forward_backward_request_to_proto(request).SerializeToString()
    step = bench.step(model, 2)
    for _ in range(2):
        assert isinstance(await bench.result(bench.service.forward_backward("ann", body)), bytes)
    assert await bench.result(step) == await bench.result(bench.step(model, 2))
    assert [name for name, *_ in bench.group.calls] == ["create", "forward_backward", "update"]
    assert bench.group.calls[0] == ("create", 4, 1)
    assert bench.group.calls[1] == ("forward_backward", "cross_entropy", {}, True)
    assert bench.group.calls[2][1]["learning_rate"] == 0.5


async def test_what_is_wrong_with_a_command_is_its_result_and_the_next_one_runs(bench):
    model = await bench.model()
    request = types.OptimStepRequest(optim_params=types.DimuonParams(learning_rate=1.0), model_id=model, seq_id=1)
    refused = await bench.result(bench.service.optim_step("ann", request))
    assert refused == {"error": "optim_params: dimuon is not supported; pass AdamParams", "category": "user"}
    assert "metrics" in await bench.result(bench.step(model, 2))


async def test_an_update_without_a_finite_gradient_is_an_error_that_the_sdk_can_read(bench):
    model = await bench.model()
    bench.group.norm = math.inf
    refused = await bench.result(bench.step(model, 1))
    assert refused == {
        "error": "the gradient's norm is inf: it was dropped, and the weights are as before",
        "category": "user",
    }
    bench.group.norm = 0.5
    assert "metrics" in await bench.result(bench.step(model, 2))


async def test_an_error_of_the_ranks_is_the_servers(bench):
    model = await bench.model()
    bench.group.error = TransientError("a rank died")
    assert await bench.result(bench.step(model, 1)) == {
        "error": "a rank died; see the service's log",
        "category": "server",
    }


async def test_the_ranks_hold_the_model_of_each_command(bench):
    ann, bob = await bench.model("ann"), await bench.model("bob")
    for number in (1, 2):
        await bench.result(bench.step(bob, number, "bob"), "bob")
    await bench.result(bench.step(ann, 1))
    bench.service.finish_session("ann", ann.partition(":")[0])
    await bench.result(bench.step(bob, 3, "bob"), "bob")
    assert bench.group.holds == [
        ("", ann, [ann]),
        (ann, bob, [ann, bob]),
        (bob, ann, [ann, bob]),
        (ann, bob, [ann, bob]),
    ], "a model waits for its client until its room is needed"
    assert [name for name, *_ in bench.group.calls] == ["create", "create", "update", "update", "update", "update"]


async def test_a_model_that_could_not_be_created_runs_no_commands(bench):
    """The ranks have what another model has left."""
    bench.group.error = TransientError("no memory")
    session = bench.session()
    failed = await bench.create(session)
    assert "no memory" in failed["error"]
    with pytest.raises(UnknownError, match="could not be created: no memory"):
        bench.step(f"{session}:train:0", 1)


async def test_a_full_service_refuses_another_client_while_the_sessions_live(single):
    await single.model("ann")
    session = single.session("bob")
    with pytest.raises(RefusedError, match=r"holds 1 adapters \(`rljob serve --max-adapters`\), and all are in use"):
        await single.create(session, "bob")
    single.now = 200.0
    assert await single.create(single.session("bob"), "bob", number=1)


async def test_a_finished_session_leaves_the_place_to_others(single):
    session = single.session("ann")
    await single.create(session)
    single.service.finish_session("ann", session)
    bob = await single.model("bob")
    assert single.group.holds[-1] == (f"{session}:train:0", bob, [bob]), "the ranks keep a model that has ended"


async def test_a_clients_new_model_replaces_its_idle_one_in_a_full_service(single):
    bench, session = single, single.session()
    first = (await bench.create(session))["model_id"]
    second = (await bench.create(session, number=1))["model_id"]
    assert first != second
    with pytest.raises(UnknownError, match=f"{first} was replaced by {second}"):
        bench.step(first, 1)
    assert (await bench.create(session, number=1))["model_id"] == second, "a retry created another model"
    assert len(bench.group.calls) == 2


async def test_a_clients_new_model_replaces_none_of_its_other_sessions(single):
    """All clients without a name are one, and a loop sends no command while it samples."""
    await single.model()
    with pytest.raises(RefusedError, match="all are in use"):
        await single.model()


async def test_a_model_with_commands_is_not_replaced(single):
    bench, session = single, single.session()
    model = (await bench.create(session))["model_id"]
    bench.step(model, 2)  # waits for the first
    with pytest.raises(RefusedError, match="all are in use"):
        await bench.create(session, number=1)
    bench.now = 200.0
    assert await bench.model("bob"), "the command of a client that went away waits for ever"
    assert "update" not in [name for name, *_ in bench.group.calls]


async def test_a_command_that_runs_ends_before_a_successor_begins(single, monkeypatch):
    """It divides its rows before it calls the ranks, which would add its gradient to the new model's."""
    bench, session, gate = single, single.session(), asyncio.Event()
    model = (await bench.create(session))["model_id"]
    call = bench.group.call

    async def wait(function: Any, *arguments: Any) -> Any:
        if function is slot.update:
            await gate.wait()
        return await call(function, *arguments)

    monkeypatch.setattr(bench.group, "call", wait)
    bench.step(model, 1)
    await asyncio.sleep(0)
    bench.service.finish_session("ann", session)
    successor = asyncio.create_task(bench.model("bob"))
    for _ in range(20):
        await asyncio.sleep(0)
    gate.set()
    await successor
    assert [name for name, *_ in bench.group.calls] == ["create", "update", "create"]


async def test_a_client_reaches_nothing_of_another(bench):
    model = await bench.model("ann")
    answer = bench.step(model, 1)
    saved = await bench.result(bench.save(model, 2, "mine"))
    bob = bench.session("bob")
    for attempt in (
        lambda: bench.step(model, 3, "bob"),
        lambda: bench.service.session_heartbeat(
            "bob", types.SessionHeartbeatRequest(session_id=model.partition(":")[0])
        ),
        lambda: bench.service.describe_weights("bob", saved["path"]),
        lambda: bench.service.load_weights(
            "bob", types.LoadWeightsRequest(session_id=bob, model_seq_id=0, path=saved["path"], optimizer=False)
        ),
    ):
        with pytest.raises(UnknownError):
            attempt()
    with pytest.raises(UnknownError):
        await bench.service.retrieve("bob", answer["request_id"], 0.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 17}, "rank: must be from 1 to 16, got 17; `rljob serve --max-rank` sets the limit"),
        ({"rank": 0}, "rank: must be from 1 to 16"),
        ({"train_mlp": False}, "train_mlp and train_attn must be true"),
        ({"seed": 2**63}, r"lora_config.seed: must be from 0 to 2\^63 - 1, got 9223372036854775808"),
        ({"seed": -1}, "lora_config.seed: must be from 0"),
    ],
)
async def test_an_adapter_that_cannot_be_is_refused(bench, fields, message):
    with pytest.raises(RefusedError, match=message):
        await bench.create(bench.session(), **fields)


async def test_a_request_is_measured_once_from_its_acceptance_to_its_result(bench):
    events = list[tuple[str, ...]]()

    async def measure(client: str, request: str, running: Any) -> Any:
        events.append((client, request))
        result = await running
        events.append(("ended",))
        return result

    bench.service._measure = measure
    model = await bench.model()
    body = json.dumps({"model_id": model, "seq_id": 1, "optim_params": {"learning_rate": 0.5}}).encode()
    for _ in range(2):
        answer = bench.service.accept("ann", "optim_step", body)
    await bench.result(answer)
    assert events == [("ann", "optim_step"), ("ended",)]
    assert bench.service.count() == {"clients": 1, "adapters": 1}


async def test_a_command_without_a_number_is_refused(bench):
    with pytest.raises(RefusedError, match="seq_id: is needed, from 1 on"):
        bench.step(await bench.model(), 0)


async def test_a_sample_of_too_many_is_refused_before_it_takes_memory(bench):
    sampler = bench.sampler(bench.session(), base_model=NAME)
    prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams()
    request = types.SampleRequest(
        prompt=prompt, sampling_params=params, sampling_session_id=sampler, seq_id=0, num_samples=10**12
    )
    with pytest.raises(RefusedError, match="num_samples: must be from 1 to 1024"):
        bench.service.asample("ann", request)


async def test_another_base_model_is_refused(bench):
    session = bench.session()
    with pytest.raises(RefusedError, match=f"base_model: other is not served here; this service has {NAME}"):
        bench.sampler(session, base_model="other")


async def test_a_state_stays_until_the_one_in_its_place_is_complete(bench):
    model = await bench.model()
    saved = await bench.result(bench.save(model, 1, "one"))

    async def fail() -> None:
        raise OSError("no space left")

    bench.group.saved = fail
    assert "no space left" in (await bench.result(bench.save(model, 2, "one", overwrite=True)))["error"]
    del bench.group.saved
    request = types.LoadWeightsRequest(session_id=bench.session(), model_seq_id=0, path=saved["path"], optimizer=True)
    assert (await bench.result(bench.service.load_weights("ann", request)))["model_id"]


async def test_state_is_saved_by_name_and_loaded_into_a_new_model(bench, tmp_path):
    model = await bench.model()
    saved = await bench.result(bench.save(model, 1, "one"))
    assert saved["path"] == f"tinker://{model}/weights/one"
    again = await bench.result(bench.save(model, 2, "one"))
    assert "name: one exists" in again["error"]
    assert "path" in await bench.result(bench.save(model, 3, "one", overwrite=True))
    request = types.LoadWeightsRequest(session_id=bench.session(), model_seq_id=0, path=saved["path"], optimizer=True)
    loaded = await bench.result(bench.service.load_weights("ann", request))
    name, folder, rank, with_optimizer = bench.group.calls[-2]  # before the snapshot
    assert (name, rank, with_optimizer) == ("load", 4, True)
    assert (folder / "tinker.json").is_file()
    info = bench.service.get_info("ann", types.GetInfoRequest(model_id=loaded["model_id"]))
    assert (info["lora_rank"], info["model_data"]["tokenizer_id"]) == (4, NAME)
    bench.journal.close()
    other = Bench(tmp_path, max_rank=32)
    request = types.LoadWeightsRequest(session_id=other.session(), model_seq_id=0, path=saved["path"], optimizer=True)
    with pytest.raises(RefusedError, match="was saved by a service with --max-rank 16"):
        other.service.load_weights("ann", request)


@pytest.mark.parametrize("name", ["../other", "", "a/b", None, "x" * 200])
async def test_a_name_is_no_path(bench, name):
    model = await bench.model()
    answer = await bench.result(bench.save(model, 1, name))
    assert answer["category"] == "user"
    assert "name: must be letters" in answer["error"]


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://m/weights",
        "tinker://../weights/x",
        "tinker://m/weights/../x",
        "s3://m/weights/x",
        "tinker://m/w/x",
    ],
)
async def test_a_path_that_names_no_checkpoint_is_refused(bench, path):
    with pytest.raises(RefusedError, match="path: "):
        bench.service.describe_weights("ann", path)


async def test_a_sampler_keeps_the_weights_that_it_was_created_for(bench):
    model = await bench.model()
    one = await bench.result(bench.save_for_sampler(model, 1, sampling_session_seq_id=0))
    named = await bench.result(bench.save_for_sampler(model, 2, path="best"))
    base = bench.sampler(model.partition(":")[0], base_model=NAME)
    assert bench.service.get_sampler("ann", one["sampling_session_id"])["base_model"] == NAME
    other = bench.session()
    by_path = bench.sampler(other, model_path=named["path"])
    for sampler in (one["sampling_session_id"], by_path, base):
        prompt, params = types.ModelInput.from_ints([1]), types.SamplingParams(max_tokens=1)
        request = types.SampleRequest(
            prompt=prompt, sampling_params=params, sampling_session_id=sampler, seq_id=0, num_samples=2
        )
        for _ in range(2):
            answer = bench.service.asample("ann", request)
            assert len(set(answer["sample_sequence_ids"])) == 2
            assert await bench.result(answer) == b"samples"
    first, second, third = bench.samples.adapters
    assert (first.name, second.name, third) == ("unnamed-1", "best", None)


async def test_unnamed_weights_are_kept_for_the_last_samplers_alone(bench, monkeypatch):
    monkeypatch.setattr("rljob_trainer.tinker.service._NUM_UNNAMED", 2)
    model = await bench.model()
    for number in range(1, 5):
        await bench.result(bench.save_for_sampler(model, number, sampling_session_seq_id=number))
    folder = next(bench.service._root.glob("ann/*/sampler_weights"))
    assert sorted(each.name for each in folder.iterdir()) == ["unnamed-3", "unnamed-4"]


async def test_weights_without_a_name_replace_none_that_a_client_has_named(bench):
    model = await bench.model()
    refused = await bench.result(bench.save_for_sampler(model, 1, path="unnamed-2"))
    assert "name: unnamed- is what weights without a name begin with" in refused["error"]


async def test_sessions_that_ended_are_forgotten(bench):
    old = bench.session()
    bench.now = 200.0
    bench.session()
    with pytest.raises(UnknownError, match="is not known: the service was started again, or it has ended"):
        bench.heartbeat("ann", old)


async def test_a_result_that_is_not_known_says_so(bench):
    session = bench.session()
    with pytest.raises(UnknownError, match="is not known, or its result was taken long ago"):
        await bench.service.retrieve("ann", f"{session}:train:0:1", 0.0)
