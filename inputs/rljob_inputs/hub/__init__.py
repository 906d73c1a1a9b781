"""The Hugging Face Hub: which repository a source names, what it contains, and one-line errors."""
