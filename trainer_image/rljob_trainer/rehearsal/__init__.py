"""One episode with given answers instead of a model's, for `rljob test-agent --answer`. Imports no torch and no Ray."""
