"""What ends a command of `jetspec` without a traceback."""


class CommandError(RuntimeError):
    """A run failed for a reason outside the program; the message says all there is to know."""
