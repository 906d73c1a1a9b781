"""The GPUs that a job takes in all. Pure."""

from rljob_api.manifest.job import RLJobSpec


def count_gpus(spec: RLJobSpec) -> dict[str, int]:
    """Return the GPUs that the job requests, by the field that requests them: served models, trainer, rollouts. What
    runs in the trainer's Pods requests none."""
    counts = {
        f"{service.path}.{service.settings.served_model_field}.gpusPerReplica": service.settings.replicas
        * model.gpus_per_replica
        for service in spec.services
        if (model := service.settings.served_model) and model.placement == "separate"
    }
    for name, role in (("trainer", spec.trainer), ("rollout", spec.rollout)):
        is_counted = spec.trains if name == "trainer" else not spec.shares_trainer
        counts[f"spec.{name}.gpusPerReplica"] = role.replicas * role.gpus_per_replica * is_counted
    return {path: count for path, count in counts.items() if count}


def count_all_gpus(spec: RLJobSpec) -> int:
    return sum(count_gpus(spec).values())
