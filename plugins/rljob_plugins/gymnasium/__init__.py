"""gymnasium: environments of text."""
