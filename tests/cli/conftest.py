import re

import pytest


def contents(folder):
    """Every file and folder below, with its bytes; what Python compiles on the way does not count."""
    found = {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
    return {path: content for path, content in found.items() if "__pycache__" not in path.parts}


@pytest.fixture
def refuses(moat, alone):
    """`refuses("train", "moat:x", says="moat:2")`: the command is the user's mistake, explained, without a trace."""

    def check(*arguments, says):
        before = contents(alone)
        code, out, err = moat(*arguments)
        assert code == 2, err
        assert out == ""
        assert re.fullmatch(r"(no CUDA GPU: [^\n]+\n)?moat: [^\n]+\n", err), err
        assert says in err
        assert contents(alone) == before
        return err

    return check
