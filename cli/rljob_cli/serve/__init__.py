"""`rljob serve`."""
