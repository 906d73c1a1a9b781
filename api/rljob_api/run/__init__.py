"""What a run leaves in its folder: the types of all records, each with one reader and one writer."""
