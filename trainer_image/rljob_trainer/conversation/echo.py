"""Whether a message that a client sends back is one that was recorded. Pure.

Clients change what they echo: content None, an empty text, or a list of parts; arguments as text or as an object; other
ids; reasoning dropped; further keys. None of this is another message.
"""

from __future__ import annotations

from rljob_api.wire.protocol import Message


def normalize(message: Message) -> Message:
    """Return the message as chat templates take it: content is text, keys without a value are left out."""
    raise NotImplementedError


def fingerprint(message: Message, *, has_reasoning: bool) -> bytes:
    """Return a digest that is the same for all forms in which clients send a message back. `has_reasoning`: whether
    <think>...</think> at the start of an answer is reasoning."""
    raise NotImplementedError
