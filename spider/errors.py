"""The errors that a command line shows as one line."""




class UsageError(Exception):
    """Something that was asked for cannot be done; the message is one line that names it and the remedy."""


class TooLarge(Exception):
    """A step takes more memory than there is; the message is one line that names the remedy."""


class CheckpointError(Exception):
    """A checkpoint or its directory cannot be used; the message is one line that names it, and the remedy."""


class Stopped(BaseException):
    """A signal asked for the end. No Exception: no library shall take it for a fault of its own."""


class Diverged(Exception):
    """Training cannot go on as it is; the message is one line with advice."""


class WorldError(Exception):
    """Ranks cannot be made or held together; the message is one line that names the rank, and the remedy."""


class LeftByPeer(Exception):
    """Another rank has met a fault, which it says itself, and all leave with it."""


class DataError(Exception):
    """Data that cannot be used; the message is one line: file, place in it and, where there is one, the remedy."""
