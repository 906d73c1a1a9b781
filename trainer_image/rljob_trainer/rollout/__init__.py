"""The process of a rollout Pod: vLLM, its middleware, and the weight puller."""
