"""What a job reads: models and datasets, from folders and from the Hugging Face Hub.

The CLI checks a job with it before anything starts, and the trainer reads with it, so both see the same rows, prompts
and errors. Imports neither torch nor transformers.
"""
