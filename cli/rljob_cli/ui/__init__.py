"""`rljob ui`: the report page, which changes while a run does."""
