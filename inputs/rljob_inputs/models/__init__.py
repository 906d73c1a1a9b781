"""Models: what config.json, the headers of the weights and the tokenizer say before anything is loaded."""
