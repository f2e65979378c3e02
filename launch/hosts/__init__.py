"""One run on several hosts, by ssh: which hosts, their checks before the start, and the ranks on all of them.

Imported by `run`; imports `launch`'s files and `pipeline`. Only `remote` starts ssh.
"""
