"""Scripts of the top level, as a user runs them, in a forked process: nothing is imported anew."""

import importlib
import os
import sys
from subprocess import CompletedProcess

from conftest import do_nothing_slow
from train import FLAGS

VARIABLES = {flag.env for flag in FLAGS if flag.env}


def child(script, argv, directory, environ, out, err):
    do_nothing_slow()
    os.chdir(directory)
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ |= environ
    for number, path in ((1, out), (2, err)):
        if path is None:                  # nobody reads it
            reading, writing = os.pipe()
            os.close(reading)
        else:
            writing = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(writing, number)
        os.close(writing)
    module = importlib.import_module(script)
    sys.exit((module.command_line if script == "train" else module.main)(argv))


def forked(processes, *argv, cwd, script="train", read=True, **environ) -> CompletedProcess:
    """Run a script in a directory; `read`: whether its output is, or goes into a pipe that nobody reads."""
    out, err = (cwd / f".{script}-{name}" for name in ("out", "err"))
    process = processes.Process(target=child, args=(script, [*map(str, argv)], str(cwd), environ,
                                                    str(out) if read else None, str(err)))
    process.start()
    process.join()
    texts = [path.read_text(errors="replace") if path.exists() else "" for path in (out, err)]
    for path in (out, err):
        path.unlink(missing_ok=True)
    return CompletedProcess([script, *argv], process.exitcode, *texts)
