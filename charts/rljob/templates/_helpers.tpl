{{/* Names, labels and the operator's rules. ClusterRole and Roles share one list of rules. */}}

{{- define "rljob.fullname" -}}
{{- $default := printf "%s-operator" .Release.Name -}}
{{- if not (contains "rljob" .Release.Name) }}{{ $default = printf "%s-rljob-operator" .Release.Name }}{{ end -}}
{{- default $default .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- end }}

{{/* Cluster-scoped names contain the release's namespace, so that two releases do not collide. */}}
{{- define "rljob.clusterName" -}}
{{ printf "%s-%s" .Release.Namespace (include "rljob.fullname" .) }}
{{- end }}

{{/* Not configurable: the NetworkPolicies of jobs admit Pods with this name. */}}
{{- define "rljob.selectorLabels" -}}
app.kubernetes.io/name: rljob-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "rljob.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "rljob.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/part-of: rljob
{{- end }}

{{- define "rljob.serviceAccountName" -}}
{{- $default := ternary (include "rljob.fullname" .) "default" .Values.serviceAccount.create -}}
{{ default $default .Values.serviceAccount.name }}
{{- end }}

{{- define "rljob.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end -}}
{{- end -}}
{{- end }}

{{- define "rljob.leaseNamespace" -}}
{{ default .Release.Namespace .Values.lease.namespace }}
{{- end }}

{{- define "rljob.leaseName" -}}
{{ default (include "rljob.fullname" .) .Values.lease.name }}
{{- end }}

{{/* What the operator may do in the namespaces of jobs. */}}
{{- define "rljob.rules" -}}
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [rljob.dev]
  resources: [rewardmodels, rljobpolicies]
  verbs: [get, list, watch]
- apiGroups: [rljob.dev]
  resources: [rljobs/status, rewardmodels/status]
  verbs: [get, patch]
# blockOwnerDeletion on children: required by OwnerReferencesPermissionEnforcement, as in OpenShift.
- apiGroups: [rljob.dev]
  resources: [rljobs/finalizers, rewardmodels/finalizers]
  verbs: [update]
- apiGroups: [""]
  resources: [secrets, configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
# To find a missing claim before Pods take nodes.
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
{{- if .Values.features.agentSandbox }}
- apiGroups: [extensions.agents.x-k8s.io]
  resources: [sandboxtemplates, sandboxwarmpools]
  verbs: [get, list, watch, create, patch, delete]
# The operator can grant only what it has: the Role of a tool allows to claim sandboxes.
- apiGroups: [extensions.agents.x-k8s.io]
  resources: [sandboxclaims]
  verbs: [get, create, delete]
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
{{- end }}
# Workloads create the Pods. The operator creates them as dry runs only, to find out whether they would be admitted.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create
  {{- if .Values.features.schedulingGates }}, patch{{ end }}
  {{- if .Values.features.forceDeletion }}, delete{{ end }}]
{{- if .Values.features.forceDeletion }}
# A Job replaces its head only after the Pod is reported as failed.
- apiGroups: [""]
  resources: [pods/status]
  verbs: [patch]
{{- end }}
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, watch, create, patch]
{{- end }}
