"""Read manifests: YAML with line numbers, validation, and messages with the field's path and a remedy."""
