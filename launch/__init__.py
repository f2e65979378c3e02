"""From a command line to running processes, on one machine or on many."""
