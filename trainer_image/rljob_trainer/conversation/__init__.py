"""A conversation as the model sees it: chat templates, exact tokens over turns, tool calls. Pure: no HTTP, no Ray."""
