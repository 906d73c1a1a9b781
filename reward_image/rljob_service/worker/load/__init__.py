"""From the settings of a function to a bound function: run its source, find its entry point, bind it."""
