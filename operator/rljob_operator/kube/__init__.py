"""The operator's I/O with Kubernetes: a cache for reads, server-side apply for writes, and one Lease.

Leaves every decision to plan. Invariant: observing a job costs no API request; nothing is written before every kind was
listed once, nor by a replica that is not the leader.

Permissions that it needs (a ClusterRole, or a Role in each namespace of --namespace). Those with a feature are granted
only if that value of the chart is set; a job that needs one waits with reason Forbidden:

| group | resources | verbs |
|---|---|---|
| rljob.dev | rljobs | get list watch delete |
| rljob.dev | rewardmodels rljobpolicies | get list watch |
| rljob.dev | rljobs/status, rewardmodels/status | get patch |
| rljob.dev | rljobs/finalizers, rewardmodels/finalizers | update (owner references that block deletion) |
| "" | secrets configmaps services | get list watch create patch delete |
| "" | pods | get list watch create (dry runs) |
| "" | pods | patch (features.schedulingGates) |
| "" | pods | delete (features.forceDeletion) |
| "" | pods/status | patch (features.forceDeletion) |
| "" | events | get list watch create patch |
| "" | persistentvolumeclaims | get |
| apps | statefulsets deployments | get list watch create patch delete |
| batch | jobs | get list watch create patch delete |
| networking.k8s.io | networkpolicies | get list watch create patch delete |
| policy | poddisruptionbudgets | get list watch create patch delete |
| apiextensions.k8s.io | customresourcedefinitions | get list watch (cluster-wide; without it no check of CRDs) |
| "" | namespaces | list watch (cluster-wide only; kopf checks whether it may) |
| extensions.agents.x-k8s.io | sandboxtemplates | get list watch create patch delete (features.agentSandbox) |
| extensions.agents.x-k8s.io | sandboxwarmpools | get list watch create patch delete (features.agentSandbox) |
| extensions.agents.x-k8s.io | sandboxclaims | get create delete (features.agentSandbox) |
| "" | serviceaccounts | get list watch create patch delete (features.agentSandbox) |
| rbac.authorization.k8s.io | roles rolebindings | get list watch create patch delete (features.agentSandbox) |
| coordination.k8s.io | leases | get create update (in --lease-namespace) |
"""
