"""Mistakes made on purpose, one at a time, in a copy: do the tests notice? ``make mutants``."""
