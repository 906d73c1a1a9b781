"""The training loop and what one step does. Nothing here uses HTTP, Ray or vLLM directly."""
