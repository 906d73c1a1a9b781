"""The driver's event loop under the tokens of a step: episodes, the poller, the time for which the loop was held."""
