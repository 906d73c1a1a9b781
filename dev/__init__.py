"""Programs for those who work on RLJob: the check of the prose, the tests of a change, the check by mutants."""
