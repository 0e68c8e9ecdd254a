"""Tables and statistical tests of the results of runs."""
