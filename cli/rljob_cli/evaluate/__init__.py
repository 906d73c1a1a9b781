"""`rljob evaluate`: evaluate several models on a job's held-out sets, here or in the cluster, and compare them."""
