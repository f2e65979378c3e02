"""Collect a host's facts before a run. Sent as text to the host's Python: standard library only, any shardvit or none.

Answers one line of JSON per line: first `answer`, then, on all hosts but the first, `connect`. Costs reading the
sources of the four packages and the manifests.
"""

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time

_CONNECT_SECONDS = 5.0
_GREETING_SECONDS = 30.0  # a host that accepted the connection may be busy
_SEE_SECONDS = 5.0  # file servers show a new file late
_SIOCGIFADDR = 0x8915  # Linux: an interface's IPv4 address
_LARGEST_DIGEST_BYTES = 64 << 20  # manifests are smaller; larger files are compared by size


def answer(questions):  # noqa: ANN001, ANN201 - runs under any Python, as it is
    """Collect this host's facts as a dictionary that JSON can hold."""
    name, text = questions["marker"]
    door = socket.create_server(("", questions["port"])) if questions["listen"] else None
    if door is not None:
        threading.Thread(target=_greet, args=(door, text), daemon=True).start()
    return {
        "machine": _machine(),
        "python": platform.python_version(),
        "packages": {package: _version(package) for package in questions["packages"]},
        "code": _code_digest(questions["modules"]),
        "revision": _revision(questions["modules"][0]),
        "sees_marker": _sees(os.path.join(questions["folder"], name), text),
        "can_write": os.access(questions["folder"], os.W_OK),
        "files": {path: _file_digest(path) for path in questions["files"]},
        "gpus": len([1 for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name)]),
        "free_bytes": _free(questions["folder"]),
        "addresses": {address: name for address, name in _interfaces().items() if not address.startswith("127.")},
        "port": door.getsockname()[1] if door is not None else 0,
        "clock": time.time(),
    }


def connect(addresses, *, port, text):  # noqa: ANN001, ANN201
    """Try to reach the first host; returns {address that answered: [IP address, own interface]}."""
    reached = {}
    for address in addresses:
        try:
            with socket.create_connection((address, port), timeout=_CONNECT_SECONDS) as line:
                line.settimeout(_GREETING_SECONDS)
                if line.makefile("r").readline().strip() == text:
                    reached[address] = [line.getpeername()[0], _interfaces().get(line.getsockname()[0], "")]
        except OSError:
            continue
    return reached


def _greet(door, text):  # noqa: ANN001, ANN202
    while True:
        try:
            line, _ = door.accept()
            line.sendall(text.encode() + b"\n")
            line.close()
        except OSError:
            return


def _machine():  # noqa: ANN202
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _version(package):  # noqa: ANN001, ANN202
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # shardvit may run from its folder without being installed; the code digest identifies it.
        return "not installed"


def _folder_of(module):  # noqa: ANN001, ANN202
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    places = list(found.submodule_search_locations or ()) if found else []
    return places[0] if places else None


def _code_digest(modules):  # noqa: ANN001, ANN202
    digest = hashlib.sha256()
    for module in modules:
        top = _folder_of(module)
        if top is None:
            return ""
        for folder, folders, files in os.walk(top):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            for name in sorted(files):
                if name.endswith((".py", ".yaml", ".j2")):
                    path = os.path.join(folder, name)
                    digest.update(f"{module}/{os.path.relpath(path, top)}\0".encode())
                    with open(path, "rb") as file:
                        digest.update(file.read() + b"\0")
    return digest.hexdigest()[:12]


def _revision(module):  # noqa: ANN001, ANN202
    command = ["git", "-C", _folder_of(module) or ".", "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _sees(path, text):  # noqa: ANN001, ANN202
    deadline = time.monotonic() + _SEE_SECONDS
    while True:
        try:
            os.listdir(os.path.dirname(path))  # else a network file system answers from its cache
            with open(path) as file:
                if file.read() == text:
                    return True
        except OSError:
            pass
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.2)


def _file_digest(path):  # noqa: ANN001, ANN202
    try:
        size = os.path.getsize(path)
        if size > _LARGEST_DIGEST_BYTES or path.endswith(".tar"):
            return f"{size} bytes"
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:12]
    except OSError as error:
        return f"! {error.strerror}"


def _free(folder):  # noqa: ANN001, ANN202
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _interfaces():  # noqa: ANN202
    found = {}  # IPv4 address -> name
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                reply = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
                found[socket.inet_ntoa(reply[20:24])] = name
            except OSError:
                continue  # no IPv4 address
    return found


def _serve():  # noqa: ANN202
    for line in sys.stdin:
        question = json.loads(line)
        if question["ask"] == "facts":
            reply = answer(question)
        else:
            reply = connect(question["addresses"], port=question["port"], text=question["text"])
        print("\n" + question["word"] + json.dumps(reply), flush=True)  # login scripts may print too


if __name__ == "__main__":
    _serve()
