"""A model of the commit protocol, and an exhaustive search of its states. See README.md."""
