//go:build tools

// Names the program that go.mod pins.
package tools

import _ "github.com/helm-unittest/helm-unittest/cmd/helm-unittest"
