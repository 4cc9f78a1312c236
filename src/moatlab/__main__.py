import sys
from pathlib import Path

# `python -m` puts the current folder before everything; a file in it must not be taken for a library's.
if sys.path[0] in ("", str(Path.cwd())):
    del sys.path[0]

from moatlab.cli.main import run

run()
