"""One run on several hosts, by ssh: which hosts, what is asked of them first, and the ranks on all of them."""
