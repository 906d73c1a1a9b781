"""The training loop and the parts of a step. It knows neither HTTP servers, Ray nor vLLM: `ports` has what it needs."""
