"""One episode with given answers instead of a model's, for `test-agent --completion`. Imports no torch and no Ray."""
