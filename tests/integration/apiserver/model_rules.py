"""What users do to a RewardModel and its children, in the operator's state machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.integration.apiserver import reward_oracle
from tests.integration.apiserver.manifests import INLINE, put, smallest
from tests.integration.apiserver.operator_machine import (
    FAULTS,
    FOREIGN_LABELS,
    OperatorMachineCore,
    ignore_status,
)

MODEL_NAME = "math"
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
    ("Service", {"metadata": {"labels": FOREIGN_LABELS}}),
    ("Secret", {"metadata": {"labels": {"rljob.dev/reward-model": "another"}}}),
    ("NetworkPolicy", None),
    ("Deployment", None),
)
"""None: it is deleted."""


class ModelRules(OperatorMachineCore):
    @precondition(lambda self: not self.has_model)
    @rule(faults=FAULTS, replicas=st.sampled_from([1, 3]))
    def create_the_model(self, faults: Any, replicas: int) -> None:
        self.operator.faults.arm(*faults)
        self._create_model(replicas)
        self.proceed()

    @precondition(lambda self: self.has_model)
    @rule(edit=st.sampled_from(MODEL_EDITS), faults=FAULTS, hurry=st.booleans())
    def edit_the_model(self, edit: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        for _ in range(20):  # the operator may write the status meanwhile
            with ignore_status(409):
                self.record_spec(self.admin.replace(put(self.model(), *edit)))
                break
        self.proceed(hurry)

    @precondition(lambda self: self.has_model)
    @rule(replicas=st.sampled_from([0, 1, 2, 4]), faults=FAULTS, hurry=st.booleans())
    def scale_the_model(self, replicas: int, faults: Any, hurry: bool) -> None:
        """As `kubectl scale` does."""
        self.operator.faults.arm(*faults)
        call = self.admin.resource("RewardModel").scale.patch
        body = {"spec": {"replicas": replicas}}
        call(name=MODEL_NAME, body=body, namespace=self.namespace, content_type="application/merge-patch+json")
        self.record_spec(self.model())
        self.proceed(hurry)

    @precondition(lambda self: self.has_model)
    @rule(tampering=st.sampled_from(MODEL_TAMPERINGS), faults=FAULTS, hurry=st.booleans())
    def tamper_with_the_models_children(self, tampering: Any, faults: Any, hurry: bool) -> None:
        self.operator.faults.arm(*faults)
        kind, change = tampering
        name = MODEL_NAME + reward_oracle.SUFFIX
        if change is None:
            self.delete((kind, name))
        else:
            self.patch(kind, name, change)
        self.proceed(hurry)

    @precondition(lambda self: self.has_model)
    @rule(faults=FAULTS, recreate=st.booleans())
    def delete_the_model(self, faults: Any, recreate: bool) -> None:
        self.operator.faults.arm(*faults)
        self.admin.delete("RewardModel", MODEL_NAME)
        self.has_model = False
        self.uids = {key: uid for key, uid in self.uids.items() if not reward_oracle.is_of_model(key)}
        if recreate:
            self._create_model(2)
        self.proceed()

    def _create_model(self, replicas: int) -> None:
        manifest = put(smallest("RewardModel", MODEL_NAME), "replicas", replicas)
        for _ in range(20):  # a deleted RewardModel disappears without delay
            with ignore_status(409):
                self.record_spec(self.admin.create(manifest))
                self.has_model = True
                return
