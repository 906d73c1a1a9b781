"""The RewardModel's part of the operator's machine: what users do to one and to its children, and when it is settled.

Leaves the faults, the cluster and the checks of all that is written to test_operator_machine. What must hold is told by
reward_oracle.
"""

from __future__ import annotations

from typing import Any

import reward_oracle
from cluster_player import Player
from direct_backend import DirectBackend
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from machine_faults import FAULTS, LABELS, unless
from manifests import INLINE, put, smallest
from operator_thread import OperatorThread

MODEL = "math"
MODEL_EDITS: tuple[tuple[str, Any], ...] = (
    ("function.inline", INLINE.replace("1.0", "0.5")),
    ("function.inline", INLINE),
    ("env", {"EXTRA": "1"}),
    ("template", reward_oracle.INVALID),
    ("template", {}),
)
MODEL_TAMPERINGS: tuple[tuple[str, Any], ...] = (
    ("ConfigMap", {"data": {"function.py": "tampered"}}),
    ("Deployment", {"spec": {"replicas": 9}}),
    ("Service", {"metadata": {"labels": LABELS}}),
    ("Secret", {"metadata": {"labels": {"rljob.dev/reward-model": "another"}}}),
    ("NetworkPolicy", None),
    ("Deployment", None),
)
"""None: it is deleted."""


class RewardModelRules(RuleBasedStateMachine):
    """Rules of one RewardModel; the machine that has them owns what is named here."""

    world: DirectBackend
    player: Player
    operator: OperatorThread
    namespace: str
    uids: dict[reward_oracle.Key, str]
    has_model = False

    @precondition(lambda self: not self.has_model)
    @rule(faults=FAULTS, replicas=st.sampled_from([1, 3]))
    def create_the_model(self, faults: Any, replicas: int) -> None:
        self.operator.faults.arm(*faults)  # an earlier one may be leaving
        self.create_model(replicas)
        self.go_on()

    @precondition(lambda self: self.has_model)
    @rule(edit=st.sampled_from(MODEL_EDITS), faults=FAULTS, hurry=st.booleans())
    def edit_the_model(self, edit: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        for _ in range(20):  # the operator's status may come between
            with unless(409):
                changed = put(self.model(), *edit)
                self.note_spec(self.world.resource("RewardModel").replace(body=changed, namespace=self.namespace))
                break
        self.go_on(hurry)

    @precondition(lambda self: self.has_model)
    @rule(replicas=st.sampled_from([0, 1, 2, 4]), faults=FAULTS, hurry=st.booleans())
    def scale_the_model(self, replicas: int, faults: Any, hurry: bool) -> None:
        """As `kubectl scale` does."""
        self.operator.faults.arm(*faults)
        call = self.world.resource("RewardModel").scale.patch
        body = {"spec": {"replicas": replicas}}
        call(name=MODEL, body=body, namespace=self.namespace, content_type="application/merge-patch+json")
        self.note_spec(self.world.resource("RewardModel").get(name=MODEL, namespace=self.namespace))
        self.go_on(hurry)

    @precondition(lambda self: self.has_model)
    @rule(tampering=st.sampled_from(MODEL_TAMPERINGS), faults=FAULTS, hurry=st.booleans())
    def tamper_with_the_models_children(self, tampering: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        kind, change = tampering
        name = MODEL + reward_oracle.ENDING
        if change is None:
            self.remove((kind, name))
        else:
            self.patch(kind, name, change)
        self.go_on(hurry)

    @precondition(lambda self: self.has_model)
    @rule(faults=FAULTS, and_again=st.booleans())
    def delete_the_model(self, faults: Any, and_again: bool) -> None:
        self.operator.faults.arm(*faults)
        self.world.resource("RewardModel").delete(name=MODEL, namespace=self.namespace)
        self.has_model = False
        self.uids = {key: uid for key, uid in self.uids.items() if not reward_oracle.is_models(key)}
        if and_again:
            self.create_model(2)
        self.go_on()

    def why_model_is_unsettled(self) -> str:
        model = self.model()
        children = {key: child for key, child in self.children().items() if reward_oracle.is_models(key)}
        if not self.has_model or model is None:
            is_settled = model is None and not self.has_model and not children
            return "" if is_settled else f"left over of the RewardModel: {sorted(children)}"
        return "; ".join(
            f"RewardModel: {words}" for words in reward_oracle.find_wrong(model, children, self.player.pods())
        )

    def create_model(self, replicas: int) -> None:
        manifest = put(smallest("RewardModel", MODEL), "replicas", replicas)
        for _ in range(20):  # its namesake goes at once: nothing holds it
            with unless(409):
                self.note_spec(self.world.resource("RewardModel").create(body=manifest, namespace=self.namespace))
                self.has_model = True
                return

    def model(self) -> Any:
        return self.world.find("RewardModel", self.namespace, MODEL)


def check_model_status(sent: Any, answer: Any) -> None:
    """What must hold of every status of a RewardModel that is written."""
    generation, current = sent["status"]["observedGeneration"], answer["metadata"]["generation"]
    said = {condition["observedGeneration"] for condition in sent["status"]["conditions"]}
    assert said == {generation}, f"conditions speak of {said}, the status of {generation}"
    assert generation <= current, f"a status speaks of generation {generation}, to come after {current}"
