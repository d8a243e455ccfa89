"""Report from inside a job whether a run would start there: what `doctor --start` judges.

A program of its own, in the directory of the job: what the profile's interpreter is and has is in
question, so it imports the standard library only and runs on Python 3.6. It stands where the
supervisor and the trainer stand in the script of a run: `batch` in the batch shell, `task` behind
srun. Nothing is judged here, and no value of a variable leaves the node, only salted digests.

Belongs here: looking and trying. Does not belong here: what the answers mean (`start_findings`),
making and submitting the job (`first_start`).
"""

import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from typing import Any, Dict  # noqa: UP035  for Python 3.6

SETTINGS = "start.json"
# Of the batch shell's program in the first and the second start of the job, and of the task.
BATCH, SECOND, TASK = "batch.json", "second.json", "task.json"
# What each import or call of Slurm may take; a first import from a busy file system takes minutes.
IMPORT_SECONDS, CALL_SECONDS, STEP_SECONDS = 240, 30, 420
SIGNAL_SECONDS = 15
# How long a requeued job takes to be ended at most, before the program says that it was not.
REQUEUE_SECONDS = 90
_LAST_TEXT = 1500
Facts = Dict[str, Any]  # noqa: UP006  for Python 3.6
# ELF header, e_machine (elf(5), /usr/include/elf.h): of the processors that clusters have.
_MACHINES = {21: "ppc64le", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
# ioctl(2) of netdevice(7): the IPv4 address of an interface.
_SIOCGIFADDR = 0x8915
_SUPERVISOR = "import hpctrain.supervise.loop; print(hpctrain.__file__)"
# cuda and hip: which kind of GPU a build is for (torch.version).
_IMPORT_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "gpus": torch.cuda.device_count(),
}))
"""
_FIND = """
import importlib.util, json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        there = importlib.util.find_spec(name) is not None
    except ImportError:
        there = False
    try:
        version = metadata.version(name.replace(".", "-"))
    except metadata.PackageNotFoundError:
        version = ""
    found[name] = version if there else None
print(json.dumps(found))
"""


def main(argv):
    # type: (list[str]) -> int
    """Run `batch`, with the words of srun behind it, or `task`."""
    if argv[0] == "task":
        write(TASK, {**look(), **task(settings())})
        return 0
    attempt = int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    if attempt:
        write(SECOND, {"restarts": attempt, "host": socket.gethostname()})
        return 0
    batch(settings(), argv[argv.index("--") + 1 :])
    return 0


def settings():
    # type: () -> Facts
    """Read what `first_start` has written."""
    with open(SETTINGS) as stream:
        return dict(json.load(stream))


def batch(wanted, srun):
    # type: (Facts, list[str]) -> None
    """Try what the supervisor needs; the report is written after each part, should one hang."""
    job = os.environ.get("SLURM_JOB_ID", "")
    report = look()
    report["digests"] = digests(wanted)
    report["shell"] = {
        name: os.environ.get("HPCTRAIN_START_" + name, "") for name in ("BASH", "LOGIN", "MODULE")
    }
    report["names"] = {name: name in os.environ for name in wanted["names"]}
    report["supervisor"] = call([sys.executable, "-c", _SUPERVISOR], IMPORT_SECONDS)
    write(BATCH, report)
    report["step"] = call(srun, STEP_SECONDS)
    report["step"]["log"] = newest_log()
    write(BATCH, report)
    report["warned"] = warned(job)
    if wanted["continuation"] == "chain":
        report["successor"] = call(["sbatch", "--test-only", "job.sbatch"], CALL_SECONDS)
    if not wanted["requeue"]:
        report["complete"] = True
        write(BATCH, report)
        return
    report["complete"] = True
    report["requeue"] = {"returncode": None, "text": "", "seconds": 0.0}
    write(BATCH, report)
    report["requeue"] = call(["scontrol", "requeue", job], CALL_SECONDS)
    if report["requeue"]["returncode"] == 0:
        time.sleep(REQUEUE_SECONDS)  # Slurm ends this process first
        report["requeue"] = {"returncode": 1, "text": "the job was not ended", "seconds": 0.0}
    write(BATCH, report)


def look():
    # type: () -> Facts
    """Describe this process and its node."""
    siblings = text_of("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
    return {
        "host": socket.gethostname(),
        "machine": platform.machine(),
        "clock": time.time(),
        "python": sys.executable,
        "version": list(sys.version_info[:3]),
        "elf": elf_machine(os.path.realpath(sys.executable)),
        "loaded": os.environ.get("LOADEDMODULES", ""),
        "module_system": module_system(),
        "cpus": len(os.sched_getaffinity(0)),
        "node_cpus": os.cpu_count() or 0,
        "threads_per_core": len(numbers(siblings)) or 1,
        "gpu_devices": len(glob.glob("/dev/nvidia[0-9]*")) + amd_gpus(),
        "run_directory": os.getcwd(),
    }


def task(wanted):
    # type: (Facts) -> Facts
    """Try what a rank needs: its environment, libraries, network, file systems and limits."""
    names = (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE)
    shared = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    return {
        "digests": digests(wanted),
        "interfaces": interfaces(),
        "interface_variables": {
            name: os.environ[name] for name in wanted["interfaces"] if name in os.environ
        },
        "filesystems": [filesystem(path) for path in wanted["filesystems"]],
        "memlock": resource.getrlimit(names[0])[0],
        "nofile": resource.getrlimit(names[1])[0],
        "shared_memory_bytes": shared.f_blocks * shared.f_frsize if shared else 0,
        "memory_limit_bytes": memory_limit(),
        "torch": call([sys.executable, "-c", _IMPORT_TORCH], IMPORT_SECONDS),
        "packages": call([sys.executable, "-c", _FIND] + wanted["packages"], IMPORT_SECONDS),
    }


# -- Trying ------------------------------------------------------------------------------------


def call(argv, limit_seconds):
    # type: (list[str], int) -> Facts
    """Run a program; `returncode` is None for one that is missing or takes too long."""
    began = time.time()
    try:
        done = subprocess.run(  # noqa: UP022  capture_output came with Python 3.7
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=limit_seconds,
        )
        code, text = done.returncode, done.stdout.decode("utf-8", "replace").strip()
        if code != 0 or not text:
            text = done.stderr.decode("utf-8", "replace").strip() or text
    except (OSError, subprocess.TimeoutExpired) as error:
        code, text = None, str(error)
    return {"returncode": code, "text": text[-_LAST_TEXT:], "seconds": time.time() - began}


def warned(job):
    # type: (str) -> Facts
    """Have Slurm send the warning to the batch shell, and wait for it (scancel(1), --batch)."""
    signal.signal(signal.SIGUSR1, lambda number, frame: None)  # the shell ignores it
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    asked = call(["scancel", "--signal=USR1", "--batch", job], CALL_SECONDS)
    came = asked["returncode"] == 0 and signal.sigtimedwait([signal.SIGUSR1], SIGNAL_SECONDS)
    return {**asked, "came": bool(came)}


def newest_log():
    # type: () -> str
    """Return the end of what srun has written for the task."""
    logs = sorted(glob.glob("logs/*.*/step*.log"), key=os.path.getmtime)
    return text_of(logs[-1])[-_LAST_TEXT:] if logs else ""


def filesystem(path):
    # type: (str) -> Facts
    """Look at a file system, and write into it where this user may: 4 KiB with fsync, thrice."""
    place = os.path.expandvars(path)
    found = {"path": path, "place": place, "there": os.path.isdir(place)}  # type: Facts
    if not found["there"]:
        return found
    real = os.path.realpath(place)
    mounts = [line.split() for line in text_of("/proc/mounts").splitlines()]
    above = [m for m in mounts if (real + "/").startswith(m[1].rstrip("/") + "/")]
    mount = max(above, key=lambda one: len(one[1])) if above else ["", "", ""]
    found.update(mount=mount[1], kind=mount[2])
    try:
        status = os.statvfs(place)
        found.update(free_bytes=status.f_bavail * status.f_frsize, free_inodes=status.f_favail)
        found.update(inodes=status.f_files)
    except OSError as error:
        found["error"] = str(error)
        return found
    run = os.path.realpath(".")
    inside = (run + "/").startswith(real.rstrip("/") + "/")
    target = run if inside else place if os.access(place, os.W_OK) else None
    if target is None:
        return found
    trial, times = os.path.join(target, f".hpctrain-start-{os.getpid()}"), []
    try:
        for _ in range(3):
            began = time.time()
            with open(trial, "wb") as stream:
                stream.write(b"0" * 4096)
                stream.flush()
                os.fsync(stream.fileno())
            times.append(time.time() - began)
            os.unlink(trial)
        found["write_seconds"] = sorted(times)[1]
    except OSError as error:
        found["error"] = str(error)
    return found


# -- Looking -----------------------------------------------------------------------------------


def digests(wanted):
    # type: (Facts) -> dict[str, str | None]
    """Digest the variables that batch shell and task are to have alike."""
    salt, found = wanted["salt"], {}  # type: str, dict[str, str | None]
    for name in wanted["passed"]:
        value = os.environ.get(name)
        text = None if value is None else hashlib.sha256((salt + value).encode()).hexdigest()[:12]
        found[name] = text
    return found


def module_system():
    # type: () -> str
    """Name the module system that this environment comes from, with its version."""
    if "LMOD_VERSION" in os.environ:
        return "Lmod " + os.environ["LMOD_VERSION"]
    version = os.path.basename(os.environ.get("MODULESHOME", ""))
    return "environment modules " + version if "MODULESHOME" in os.environ else ""


def interfaces():
    # type: () -> Facts
    """List the network interfaces: state, and whether they have an address."""
    six = {line.split()[-1] for line in text_of("/proc/net/if_inet6").splitlines() if line}
    found = {}  # type: Facts
    for path in sorted(glob.glob("/sys/class/net/*")):
        name = os.path.basename(path)
        if not os.path.isdir(path):
            continue  # bonding_masters is a file
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
            try:
                asked = struct.pack("256s", name[:15].encode())
                fcntl.ioctl(end.fileno(), _SIOCGIFADDR, asked)
                addressed = True
            except OSError:
                addressed = name in six
        state = text_of(os.path.join(path, "operstate"))
        found[name] = {"up": state in ("up", "unknown"), "addressed": addressed}
    return found


def elf_machine(path):
    # type: (str) -> str | None
    """Read for which processors a program is built; None for a script or what cannot be read."""
    try:
        with open(path, "rb") as stream:
            head = stream.read(20)
    except OSError:
        return None
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    number = struct.unpack((">" if head[5] == 2 else "<") + "H", head[18:20])[0]
    return _MACHINES.get(number, f"machine {number}")


def numbers(listed):
    # type: (str) -> list[int]
    """Expand a list of CPUs of the kernel: `0,24` or `0-1`."""
    found = []  # type: list[int]
    for part in re.findall(r"\d+(?:-\d+)?", listed):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def amd_gpus():
    # type: () -> int
    """Count the GPUs of AMD's driver: nodes of its topology that have SIMD units."""
    paths = glob.glob("/sys/class/kfd/kfd/topology/nodes/*/properties")
    return sum(1 for path in paths if re.search(r"^simd_count [1-9]", text_of(path), re.MULTILINE))


def memory_limit():
    # type: () -> int | None
    """Read the limit of this process's control group, the tightest above it; None without one."""
    found = []
    for line in text_of("/proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        root = "/sys/fs/cgroup" if number == "0" else "/sys/fs/cgroup/memory"
        name = "memory.max" if number == "0" else "memory.limit_in_bytes"
        if number != "0" and "memory" not in controllers.split(","):
            continue
        while path not in ("", "/"):
            text = text_of(root + path + "/" + name)
            if text.isdigit() and int(text) < 2**60:
                found.append(int(text))
            path = os.path.dirname(path)
    return min(found) if found else None


def text_of(path):
    # type: (str) -> str
    """Read a file; empty if it cannot be read."""
    try:
        with open(path, errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def write(path, content):
    # type: (str, Facts) -> None
    """Put a complete file in the place of the one before."""
    part = path + ".part"
    with open(part, "w") as stream:
        json.dump(content, stream)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
