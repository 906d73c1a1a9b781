"""`rljob evaluate`: evaluate several models on a job's held-out sets, and compare them."""
