import sys
from pathlib import Path

# `python -m` puts the current folder first on the path; a file in it must not shadow a library.
if sys.path[0] in ("", str(Path.cwd())):
    del sys.path[0]

from moatlab.cli.main import run

run()
