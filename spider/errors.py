"""Define the errors that a command line shows as one line: all of SpiderError, of which UsageError, DataError and the
rest say who is at fault; and two ends of a run, Stopped and LeftByPeer."""


class SpiderError(Exception):
    """Something that a user can mend. The message is one line that names what is at fault, and the remedy."""


class UsageError(SpiderError):
    """A request that cannot be fulfilled: a bad flag, variable or setting, or a machine that lacks what it takes."""


class DataError(SpiderError):
    """Data that cannot be used; the message names the file, the offset in it and, where there is one, the remedy."""


class CheckpointError(SpiderError):
    """A checkpoint, or a directory of checkpoints, that cannot be used."""


class TooLarge(SpiderError):
    """A step that takes more memory than there is."""


class Diverged(SpiderError):
    """Training that cannot continue as it is; the message gives advice."""


class WorldError(SpiderError):
    """Ranks that cannot be started or kept together; the message names the rank."""


class LeftByPeer(Exception):
    """Another rank has failed, which it reports itself; all ranks stop with it."""


class Stopped(BaseException):
    """A signal asked the process to stop. Not an Exception, so that no library takes it for a fault of its own."""
