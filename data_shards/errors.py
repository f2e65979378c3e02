"""The one exception that means "the user can mend this".

A `UserError` carries one sentence that names the file, the key or the flag and says what to change. The command line
prints it without a traceback and exits with code 2. Everything else that is raised is our own mistake or the
machine's, and keeps its traceback.
"""


class UserError(ValueError):
    """A mistake of the user's; `str(error)` is the whole message, fit to be printed as it is."""


class SampleError(UserError):
    """A sample that cannot be read: one process alone comes upon it, so that process must speak up."""
