"""Print what one node says about itself, as JSON: GPUs, network cards, limits, mounts, launchers.

A program of its own: `profile detect --in-job` sends this file to a node, where hpctrain need not
be installed. So it imports the standard library only, and runs on Python 3.6 (the python3 of
RHEL 8). Nothing is judged or converted here; texts of programs come along as they are.

Belongs here: reading. Does not belong here: what the texts mean (`hpctrain.site.facts`),
starting it (`hpctrain.site.read_site`).
"""

import glob
import json
import os
import platform
import resource
import socket
import subprocess
import sys

FORMAT = 2
MARK = "hpctrain-node-survey "
COMMAND_SECONDS = 20
LONGEST_TEXT = 60000
# Interpreters that are looked for beside those on PATH; whoever sends this file puts its own here.
INTERPRETERS = []  # type: list[str]
VERSION_PROGRAM = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
# A login shell has `module` where any shell has; the files are those that Lmod, environment-modules
# and distributions install.
MODULE_PROGRAM = """
type -t module || exit 0
module --version 2>&1 | grep -i -m1 'version\\|release'
for file in "${LMOD_PKG:-/nowhere}/init/bash" "${MODULESHOME:-/nowhere}/init/bash" \\
    /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh; do
  if [ -r "$file" ]; then echo "init=$file"; break; fi
done
if [ -d /opt/cray/pe ]; then echo cray; fi
"""
# A driver that hangs must not keep the node: every command has the time limit above.
COMMANDS = {
    "nvidia-smi": ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"],
    "nvidia-smi topo": ["nvidia-smi", "topo", "-m"],
    "rocm-smi": ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--json"],
    "df": ["df", "-PTk"],
    "enroot": ["enroot", "version"],
    "apptainer": ["apptainer", "--version"],
    "singularity": ["singularity", "--version"],
    "srun": ["srun", "--help"],
    "module": ["bash", "-lc", MODULE_PROGRAM],
    "scontrol": ["scontrol", "--version"],
    "sbatch": ["sbatch", "--test-only", "--nodes=1", "--time=1", "--wrap=true"],
}
# Names only of what sites set for directories; no other variable leaves the node.
VARIABLES = ("TMPDIR", "SCRATCH", "WORK", "PROJECT", "SLURM_JOB_PARTITION", "SLURMD_NODENAME")
LIMITS = {"core": resource.RLIMIT_CORE, "memlock": resource.RLIMIT_MEMLOCK}
LIMITS["nofile"] = resource.RLIMIT_NOFILE


def main():
    # type: () -> int
    """Print one line of JSON behind MARK."""
    print(MARK + json.dumps(survey()))
    return 0


def survey():
    # type: () -> dict[str, object]
    """Collect everything that this node says about itself."""
    return {
        "format": FORMAT,
        "host": socket.gethostname(),
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "python_path": sys.executable,
        "interpreters": interpreters(),
        "machine": platform.machine(),
        "system": text_of("/etc/os-release"),
        "cpus": len(os.sched_getaffinity(0)),
        "commands": {name: command(argv) for name, argv in COMMANDS.items()},
        "infiniband": infiniband(),
        "interfaces": interfaces(),
        "routes": text_of("/proc/net/route"),
        "mounts": text_of("/proc/mounts"),
        "limits": {name: list(resource.getrlimit(key)) for name, key in LIMITS.items()},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "gpu_devices": sorted(glob.glob("/dev/nvidia[0-9]*") + glob.glob("/dev/dri/renderD*")),
    }


def command(argv):
    # type: (list[str]) -> dict[str, object]
    """Run a program; `returncode` is None for one that is missing or takes too long."""
    try:
        done = subprocess.run(  # noqa: UP022  capture_output came with Python 3.7
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            timeout=COMMAND_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"returncode": None, "stdout": "", "stderr": str(error)[:300]}
    return {
        "returncode": done.returncode,
        "stdout": done.stdout.decode("utf-8", "replace")[:LONGEST_TEXT],
        "stderr": done.stderr.decode("utf-8", "replace")[:2000],
    }


def interpreters():
    # type: () -> dict[str, str]
    """Find interpreters by the names that distributions give them, with their versions."""
    names = ["python3", *(f"python3.{minor}" for minor in range(11, 20))]
    places = [*os.environ.get("PATH", "").split(":"), "/usr/bin", "/usr/local/bin"]
    places = [os.path.realpath(place) for place in places if place]  # /bin is /usr/bin
    paths = INTERPRETERS + [os.path.join(place, name) for name in names for place in places]
    found = {}
    for path in paths:
        if path not in found and os.path.isabs(path) and os.access(path, os.X_OK):
            version = command([path, "-c", VERSION_PROGRAM])
            if version["returncode"] == 0:
                found[path] = str(version["stdout"]).strip()
    return found


def infiniband():
    # type: () -> dict[str, dict[str, str]]
    """Read the ports of RDMA cards: /sys/class/infiniband/CARD/ports/PORT."""
    found = {}
    for port in sorted(glob.glob("/sys/class/infiniband/*/ports/*")):
        card = port.split("/")[4]
        names = ("rate", "link_layer", "state")
        values = {name: text_of(os.path.join(port, name)) for name in names}
        found[card + "/" + os.path.basename(port)] = values
    return found


def interfaces():
    # type: () -> dict[str, object]
    """Read the network interfaces: speed in Mb/s, state."""
    return {
        os.path.basename(path): {
            name: text_of(os.path.join(path, name)) for name in ("speed", "operstate")
        }
        for path in sorted(glob.glob("/sys/class/net/*"))
        if os.path.isdir(path)
    }


def text_of(path):
    # type: (str) -> str
    """Read a file of the kernel; empty if it cannot be read."""
    try:
        with open(path) as stream:
            return stream.read(LONGEST_TEXT).strip()
    except (OSError, UnicodeDecodeError):
        return ""


if __name__ == "__main__":
    sys.exit(main())
