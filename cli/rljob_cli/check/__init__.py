"""`rljob validate`, `init` and `test-reward`: what can be checked before a job runs."""
