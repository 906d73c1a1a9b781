"""The training loop and the parts of a step. It knows neither Ray nor vLLM, see `ports`."""
