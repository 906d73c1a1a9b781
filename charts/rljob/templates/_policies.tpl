{{/* What the ValidatingAdmissionPolicies of the chart share. */}}

{{/* The optional value of X.FIELD.INNER, none if X.FIELD is not a map: on a list `.?` fails. */}}
{{- define "rljob.cel.in" -}}
{{- $x := index . 0 }}{{ $field := index . 1 -}}
(type({{ $x }}.?{{ $field }}.orValue('')) == map ? {{ $x }}.{{ $field }}.?{{ index . 2 }} : optional.none())
{{- end }}

{{/* A list of different texts in alphabetical order: the maps of CEL have none, and its sort() needs Kubernetes 1.35. One
with more than so many stays as it is. */}}
{{- define "rljob.cel.sorted" -}}
{{- $list := index . 0 }}{{ $most := index . 1 | int -}}
({{ $list }}.size() > {{ $most }} ? {{ $list }} : {{ until $most | toJson }}.filter(i, i < {{ $list }}.size())
  .map(i, {{ $list }}.filter(x, {{ $list }}.filter(y, y < x).size() == i)[0]))
{{- end }}

{{/* Objects that are older than the policy can still be suspended, resumed, annotated and scaled. */}}
{{- define "rljob.cel.changed" -}}
- name: spec-has-changed
  expression: >-
    oldObject == null
    || dyn(object).spec.exists(f, f != 'suspend' && dyn(oldObject).spec[?f] != dyn(object).spec[?f])
    || dyn(oldObject).spec.exists(f, f != 'suspend' && !(f in dyn(object).spec))
{{- end }}

{{/* From the path of each role with Pods to its value. */}}
{{- define "rljob.cel.roles" -}}
- name: roles
  expression: >-
    dyn(object).kind == 'RewardModel' ? {'spec': dyn(object).spec} : [
      dyn(object).spec.transformMap(f, role, f in ['head', 'trainer', 'rollout'], role)
        .transformMapEntry(f, role, {'spec.' + f: role}),
      dyn(object).spec.?rewards.orValue([]).transformMapEntry(i, role, {'spec.rewards[' + string(i) + ']': role}),
      [dyn(object).spec].transformMapEntry(i, spec, spec.?agent.?user.hasValue(), {'spec.agent.user': spec.agent.user}),
      [dyn(object).spec].transformMapEntry(i, spec, spec.?agent.?runner.hasValue(),
        {'spec.agent.runner': spec.agent.runner}),
      [dyn(object).spec].transformMapEntry(i, spec, spec.?agent.?tools.hasValue(),
        spec.agent.tools.transformMapEntry(j, role, {'spec.agent.tools[' + string(j) + ']': role}))
    ].transformMapEntry(i, part, part)
{{- end }}

{{/* The actions and namespaces of a binding: the values, and the policy's mode. */}}
{{- define "rljob.policyBinding" -}}
{{- $root := index . 0 }}{{ $mode := index . 1 -}}
validationActions: {{ ternary (list "Deny") (list "Warn" "Audit") (eq $mode "deny") | toJson }}
{{- $selector := $root.Values.templatePolicy.namespaceSelector }}
{{- with $root.Values.watchNamespaces }}
{{- $own := dict "key" "kubernetes.io/metadata.name" "operator" "In" "values" . }}
{{- $selector = set (deepCopy $selector) "matchExpressions" (append (default list $selector.matchExpressions) $own) }}
{{- end }}
{{- with $selector }}
matchResources:
  namespaceSelector:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}
