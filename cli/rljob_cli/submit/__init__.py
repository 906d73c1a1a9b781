"""`rljob submit`: takes a job's local files to a cluster, and applies the job there."""
