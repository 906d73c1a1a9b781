"""Whether a job is within the RLJobPolicy of its namespace: from a file (`validate --policy`) or a cluster (`submit`).

The operator decides with the same functions and with the installation's defaults, which are unknown here. So a node
label that nothing sets is no problem here: the installation may set it. And an image or a PriorityClass that the limits
do not name may be one of its defaults: that is not certain.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from rljob_api.errors import UserError
from rljob_api.manifest.job import RLJob
from rljob_api.manifest.policy import POLICY_NAME, RLJobPolicy
from rljob_api.manifest.services.reward import RewardModel
from rljob_api.read.documents import Document, Problem, parse_path, read_documents
from rljob_api.read.load import InvalidManifestError, read_section
from rljob_core.backend import Manifest, ObservedState, Owner, utc_now
from rljob_core.children import build_children
from rljob_core.children.start_model import with_any_claim
from rljob_core.defaults import DEFAULTS
from rljob_core.plan.policy_defaults import apply_policy, choose_queue
from rljob_core.plan.policy_limits import EXEMPTS_DEFAULTS, Violation, find_violations
from rljob_core.plan.reward_model import plan_reward_model
from rljob_core.pod_checks.schema import describe_unknown_field


def load_policy(path: Path) -> RLJobPolicy:
    """Return the policy in a file. Raises UserError with all problems and their lines."""
    try:
        documents, problems = read_documents(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
    policy = None
    if len(documents) != 1:
        problems.append(Problem("", 1, f"must be one RLJobPolicy, got {len(documents)} documents"))
    elif not problems:
        policy, problems = read_section(RLJobPolicy, documents[0])
        problems += _find_unknown_fields(policy, documents[0]) if policy else []
    if problems or policy is None:
        raise InvalidManifestError(str(path), problems)
    return policy


def _find_unknown_fields(policy: RLJobPolicy, document: Document) -> Iterator[Problem]:
    """A field that Kubernetes does not have allows nothing, and the one that was meant is refused in each job."""
    for index, field in enumerate(policy.spec.limits.template_fields or []):
        if problem := describe_unknown_field(field):
            path = f"spec.limits.templateFields[{index}]"
            yield Problem(path, document.line_of(parse_path(path)), f"{field} {problem}")


def read_policy(manifest: Manifest) -> RLJobPolicy | None:
    """Return a stored policy; None if this version does not know one of its fields: the operator checks it."""
    try:
        return RLJobPolicy.model_validate(manifest)
    except ValidationError:
        return None


class PolicyProblem(NamedTuple):
    """What the limits of a policy do not allow."""

    message: str
    is_certain: bool
    """Whether the operator refuses it whatever the defaults of the installation are."""


def find_policy_problems(job: RLJob, models: Mapping[str, RewardModel], policy: RLJobPolicy) -> Iterator[PolicyProblem]:
    """Yield what the operator would refuse. Raises UserError if the job cannot be built."""
    limits = policy.spec.limits
    labels = {name: values[0] for name, values in limits.node_labels.items()}
    defaults = apply_policy(DEFAULTS.model_copy(update={"node_selector": labels}), policy)
    job = choose_queue(job, policy, {})
    children = build_children(with_any_claim(job), "", defaults, models)
    yield from (_describe(job, each) for each in find_violations(job, children, limits, defaults))
    for name, model in models.items():
        children = list(plan_reward_model(model, ObservedState(), utc_now(), defaults=defaults).children)
        for each in find_violations(model, children, limits, defaults):
            found = _describe(model, each)
            yield found._replace(message=f"RewardModel {name}: {found.message}")


def _describe(owner: Owner, violation: Violation) -> PolicyProblem:
    message = violation.describe(f"RLJobPolicy {owner.metadata.namespace}/{POLICY_NAME}")
    is_certain = violation.limit not in EXEMPTS_DEFAULTS
    doubt = "" if is_certain else ", unless it is a default of the installation"
    return PolicyProblem(f"{message}{doubt}", is_certain)
