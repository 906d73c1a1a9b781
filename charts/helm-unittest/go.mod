// The pin of helm-unittest: `go install` takes no module with a replace directive, so this one repeats it.
module rljob.dev/charts/helm-unittest

go 1.26.0

require github.com/helm-unittest/helm-unittest v1.1.2

replace github.com/vmware-labs/yaml-jsonpath v0.3.2 => github.com/helm-unittest/yaml-jsonpath v0.4.0
