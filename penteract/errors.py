"""The error that every command shows as one message instead of a traceback."""


class UserError(ValueError):
    """The user's input is wrong; the message is for the user."""
