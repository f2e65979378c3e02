"""One run on several hosts: which hosts, their checks, and the ranks on all of them."""
