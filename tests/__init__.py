"""RLJob's tests: a package, so that tests in any folder import `tests.paths` and `tests.support`."""
