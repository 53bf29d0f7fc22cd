"""Measures what qmflask adds to a model server used directly, in the same run: `make bench`."""
