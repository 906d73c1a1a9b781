"""`rljob report`: a run as one HTML page without any other file."""
