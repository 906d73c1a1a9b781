"""What a driver talks to in its tests: a trainer group, a rollout, a reward server and a service of the agent.

The trainer group keeps its 'weights' in memory and in its checkpoint files; the others answer over real HTTP. Each asks
its `harness` (tests.support.driver_harness) which faults to play.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random

import numpy as np
from aiohttp import web

from rljob_api.wire.calls import CallResult
from rljob_api.wire.driver_status import TrainerChoices
from rljob_api.wire.scores import ScoreResult
from rljob_api.wire.weights import EnginesReport, RolloutWeights, WeightManifest
from rljob_trainer.driver.ports import FreedMemory, TrainerGroupDiedError
from rljob_trainer.episodes.types import TokenFacts, UpdateMetrics
from rljob_trainer.run_folder.file_facts import describe_file, verify_files

EOS = 0


def checksum_of(weight: int) -> str:
    return hashlib.sha256(str(weight).encode()).hexdigest()


class FakeTrainer:
    """A trainer group whose parameters are one number: a digest of all its training samples, in order."""

    def __init__(self, harness, generation, weight):
        self.harness, self.generation, self.weight = harness, generation, weight
        self.alive = True
        self.is_free = False
        self.choices = TrainerChoices(
            recomputation="none",
            micro_batch_tokens=harness.job.spec.trainer.largest_micro_batch,
            weight_transfer="file",
        )
        self._pending = []

    def _live(self, what):
        if not self.alive:
            raise TrainerGroupDiedError("the group has ended")
        if self.harness.kill_trainer(what):
            self.alive = False
            raise self.harness.group_death(f"a rank died during {what}")

    def _works(self, what):
        if self.is_free or any(not rollout.is_asleep for rollout in self.harness.sharing):
            self.harness.violations.append(f"the trainer runs {what} in the rollouts' turn")
        self._live(what)

    async def inspect(self, rows):
        self._works("inspect")
        return [TokenFacts(-0.5 * row.loss_mask, np.zeros(len(row.token_ids))) for row in rows]

    async def accumulate(self, rows, versions):
        await asyncio.sleep(0)
        self._works("accumulate")
        self._pending += rows
        self.harness.versions.append(versions)
        self._live("after accumulate")

    async def apply(self, denominator):
        await self.harness.before_apply()
        self._works("update")
        rows, self._pending = self._pending, []
        # In any order, as gradients add up.
        texts = sorted(json.dumps([r.token_ids.tolist(), r.loss_mask.tolist(), _rounded(r.advantages)]) for r in rows)
        self.weight = int(hashlib.sha256(f"{self.weight}{texts}{denominator}".encode()).hexdigest()[:12], 16)
        self.harness.updates.append(rows)
        self._live("after update")
        num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
        return UpdateMetrics(
            loss=0.1, policy_loss=0.1, kl=0.0, entropy=1.0, grad_norm=0.5, learning_rate=1e-5, clip_fraction=0.0,
            logprob_difference=0.01, num_tokens=num_tokens, num_micro_batches=1, seconds=0.01,
        )  # fmt: skip

    async def follow(self, spec):
        self._live("follow")
        self.harness.trainer_specs.append(spec)

    async def publish(self, version):
        self._works("publish")
        checksum = checksum_of(self.weight)
        manifest = WeightManifest(
            generation=self.generation, version=version, url="http://x", num_bytes=1,
            file_hash=checksum, checksum=checksum,
        )  # fmt: skip
        self.harness.published = manifest
        self.harness.weight = self.weight
        return manifest

    async def save(self, folder):
        self._live("save")
        self._saving = (folder / "trainer", self.weight)

    async def saved(self):
        folder, weight = self._saving
        await self.harness.before_write()
        self._live("write")
        folder.mkdir()
        (folder / "weight").write_text(str(weight))
        self._live("after write")
        return {"trainer/weight": describe_file(folder, "weight")}

    async def export(self, folder, tokenizer_source, checkpoint=None):
        self._live("export")
        weight = self.weight
        if checkpoint is not None:
            verify_files(checkpoint.folder, checkpoint.files, ["trainer/weight"])
            weight = int((checkpoint.folder / "trainer" / "weight").read_text())
        (folder / "weight").write_text(str(weight))
        self._live("after export")

    async def free(self):
        self._live("free")
        self.is_free = True
        self._live("after free")
        return FreedMemory(200, 50)

    async def restore(self):
        self._live("restore")
        self.is_free = False
        self._live("after restore")

    async def offer_weights(self):
        self._live("offer")

    async def withdraw_weights(self):
        self._live("withdraw")

    async def watch(self):
        await self.harness.trainer_died.wait()
        self.harness.trainer_died.clear()
        self.alive = False
        raise self.harness.group_death("a rank died")

    async def close(self):
        self.alive = False


def _rounded(values):
    return [round(float(value), 6) for value in values]


class FakeEngines:
    """The supervisors of the trainer's Pods, without HTTP: the harness' rollouts share its trainer's devices."""

    def __init__(self, harness):
        self.harness = harness

    async def sleep(self):
        await self.harness.before_turn("trainer")
        for rollout in self.harness.sharing:
            rollout.is_asleep, rollout.loaded = True, None
            await asyncio.sleep(0)  # a cancellation may leave others awake
        return EnginesReport(num_running=len(self.harness.sharing), num_restarts=1, num_bytes=10, seconds=0.0)

    async def wake(self, manifest):
        await self.harness.before_turn("rollouts")
        if not self.harness.trainers[-1].is_free:
            self.harness.violations.append("rollouts wake while the trainer has the devices")
        if self.harness.board.manifest != manifest:
            self.harness.violations.append("rollouts wake for weights that are not announced")
        for rollout in self.harness.sharing:
            rollout.is_asleep, rollout.loaded = False, manifest
            await asyncio.sleep(0)
        return EnginesReport(num_running=len(self.harness.sharing), num_restarts=1, num_bytes=100, seconds=0.0)


class FakeRollout:
    """vLLM behind the middleware: tokens are a function of weights, prompt and seed, as in an exact engine."""

    def __init__(self, harness, address):
        self.harness, self.address = harness, address
        self.num_served = 0
        self.down = False
        self.wrong_digest = False
        self.is_asleep, self.loaded = False, None
        """Whether it sleeps, and the weights that it has loaded, if it shares the trainer's devices."""
        self.max_at_once = self.at_once = 0

    def _served(self):
        manifest = self.loaded if self.harness.sharing else self.harness.published
        if manifest is None:
            return RolloutWeights()
        checksum = "wrong" if self.wrong_digest else manifest.checksum
        return RolloutWeights(
            generation=manifest.generation, version=manifest.version, file_hash=manifest.file_hash, checksum=checksum,
            pause_seconds=0.25, transfer_seconds=0.5,
        )  # fmt: skip

    async def weights(self, request):
        if self.down:
            return web.Response(status=503)
        if self.harness.withhold(self.harness.published):
            return web.Response(status=503)
        for _ in range(100):
            if self._served().key == request.query["want"]:
                break
            await asyncio.sleep(0.01)
        return web.json_response(self._served().model_dump())

    async def models(self, request):
        return web.json_response({"data": [{"id": "policy", "max_model_len": 3}]})

    async def complete(self, request):
        body = await request.json()
        if self.is_asleep:
            self.harness.violations.append("a completion is requested in the trainer's turn")
        if self.harness.rejects(body["token_ids"]):
            return web.json_response({"error": {"message": "the prompt is too long", "code": 400}}, status=400)
        if self.down or self.harness.break_completion(self):
            request.transport.abort()
            return web.Response()
        weight, first = self.harness.weight, self.harness.published.key
        self.at_once += 1
        self.max_at_once = max(self.max_at_once, self.at_once)
        await asyncio.sleep(0.002)
        self.at_once -= 1
        seed = body["sampling_params"]["seed"]
        draw = random.Random(f"{weight}/{body['token_ids']}/{seed}")
        tokens = [draw.randrange(1, 100) for _ in range(draw.randrange(1, 5))] + [EOS]
        text = " ".join(map(str, tokens[:-1]))
        if self.harness.write_answer is not None:  # of a conversation: tokens that its template knows
            text = self.harness.write_answer(draw, self.harness.template.decode(body["token_ids"]))
            tokens = self.harness.template.encode(f"{text}<|im_end|>")
        self.num_served += 1
        self.harness.sampling[(*body["token_ids"], *tokens)] = body["sampling_params"]
        spans = [(first, 0, 1), (self.harness.published.key, 1, len(tokens))]
        choice = {
            "text": text,
            "token_ids": tokens,
            "logprobs": {"content": [{"logprob": -0.5}] * len(tokens)},
            "finish_reason": "stop",
            "weight_versions": [{"version": key, "start": start, "end": end} for key, start, end in spans],
        }
        lines = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n"
        return web.Response(text=lines, content_type="text/event-stream")


class FakeReward:
    """A reward server: the score is the first token, unless `harness.judge` returns a response."""

    def __init__(self, harness, address):
        self.harness, self.address = harness, address
        self.num_served = 0
        self.version = ""

    async def info(self, request):
        return web.json_response({"version": self.version})

    async def score(self, request):
        body = await request.json()
        self.harness.requests.append(body)
        answer = self.harness.judge(self, body)
        if answer is None:
            score = int(body["completion"].split()[0]) / 100
            components = {"exact": float(score > 0.5)}
            result = ScoreResult(id=body["id"], valid=True, score=score, components=components, version=self.version)
            answer = web.json_response(result.model_dump(mode="json"))
        elif isinstance(answer, ScoreResult):
            answer = web.json_response(answer.model_dump(mode="json"))
        self.num_served += 1
        return answer


class FakeService:
    """The simulated user, a tool with one function, or the runner: the answer is that of `harness.answer_call`."""

    def __init__(self, harness, address, function=""):
        self.harness, self.address, self.function = harness, address, function
        self.bodies = []

    async def info(self, request):
        schema = {"name": self.function, "description": "", "parameters": {"type": "object", "properties": {}}}
        return web.json_response({"version": "v1", "tools": [schema] if self.function else []})

    async def call(self, request):
        body = await request.json()
        self.bodies.append(body)
        found = self.harness.answer_call(self, body)
        if asyncio.iscoroutine(found):
            found = await found
        if isinstance(found, web.Response):
            return found
        fields = found if isinstance(found, dict) and "valid" in found else {"valid": True, "value": found}
        result = CallResult(id=body["id"], version="v1", **fields)
        return web.json_response(result.model_dump(mode="json"))
