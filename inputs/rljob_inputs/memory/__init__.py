"""How much memory each role of a job needs, by part. Pure: from the manifest and config.json, without torch."""
