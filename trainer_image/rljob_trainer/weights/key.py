"""Keys of published weights, as requests name them: GENERATION:VERSION."""


def parse_key(key: str) -> tuple[str, int]:
    """Return generation and version. ValueError with what is wrong."""
    generation, _, version = key.rpartition(":")
    if not generation or not version.isdecimal():
        raise ValueError(f"want must be GENERATION:VERSION, got {key!r}")
    return generation, int(version)
