"""The plugins that are installed here, as the CLI and the server find them."""

from rljob_api.functions.conventions import load_signatures
from rljob_api.functions.plugins import ENVIRONMENTS, SIGNATURES, find_plugins

REFERENCES = find_plugins(SIGNATURES)
ADAPTERS = find_plugins(ENVIRONMENTS)
KNOWN = load_signatures(REFERENCES)
