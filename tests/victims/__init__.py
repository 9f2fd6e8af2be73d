"""Small real programs that tests start, disturb and look at."""
