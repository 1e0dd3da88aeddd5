"""Errors: subclasses of SpiderError are shown as one line on the command line; Stopped and LeftByPeer end a run."""


class SpiderError(Exception):
    """An error that the user can fix. The message is one line with the cause and the remedy."""


class UsageError(SpiderError):
    """A bad flag, variable or setting, or a machine that does not support it."""


class DataError(SpiderError):
    """Unusable data; the message has the file, the offset and, if there is one, the remedy."""


class CheckpointError(SpiderError):
    """An unusable checkpoint or directory of checkpoints."""


class TooLarge(SpiderError):
    """A step that needs more memory than there is."""


class Diverged(SpiderError):
    """Training that diverged; the message gives advice."""


class WorldError(SpiderError):
    """Ranks that cannot start or lost contact; the message names the rank."""


class LeftByPeer(Exception):
    """Another rank failed and reports it; this rank stops silently."""


class Stopped(BaseException):
    """A signal asked the process to stop. Not an Exception, so that libraries do not catch it."""
