"""The one exception for a mistake that the user can mend."""


class InputError(ValueError):
    """A mistake in the user's config, command line or data.

    Its message is one sentence: the key or file, what was found, what is allowed, what to do. The
    entry points print it without a traceback and exit with status 2.
    """
