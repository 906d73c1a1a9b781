"""`rljob test-agent`: episodes of a job on this machine, before anything is trained."""
