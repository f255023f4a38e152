"""The options of sbatch, and a look at a finished script: does Slurm read what is meant?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from kedge.core.suggest import did_you_mean

_NAMES: Final = """
account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus
gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint hold ignore-pbs input job-name kill-on-invalid-dep
licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice no-kill no-requeue
nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step
open-mode output overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot
requeue reservation resv-ports segment signal sockets-per-node spread-job stepmgr switches test-only thread-spec
threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes verbose wait wait-all-nodes wckey wrap
"""
KNOWN: Final = frozenset(_NAMES.split())
"""Long names, as the manual page of sbatch has them."""
_OWN: Final = """
job-name nodes ntasks-per-node gpus-per-node time account partition output open-mode requeue no-requeue signal wrap
chdir
"""
OWN: Final = frozenset(_OWN.split())
"""Those that the templates write, or rely on."""
_BARE: Final = """
contiguous exclusive get-user-env hold ignore-pbs nice no-kill no-requeue overcommit oversubscribe parsable propagate
quiet reboot requeue resv-ports spread-job stepmgr test-only use-min-nodes verbose wait
"""
BARE: Final = frozenset(_BARE.split())
"""Those that may stand without a value."""
_PROCESSES: Final = "how many processes there are, --nodes and --processes-per-node say"
_GPUS: Final = "how many GPUs there are, --nodes and --gpus-per-node say"
CONTRADICTING: Final = {
    "ntasks": _PROCESSES,
    "ntasks-per-gpu": _PROCESSES,
    "gpus": _GPUS,
    "gpus-per-task": _GPUS,
    "gpus-per-socket": _GPUS,
    "array": "all jobs of an array would write one run; write a file for each run, with a name of its own "
    "(--set name=NAME)",
}
"""Those that say otherwise what the templates say, and why they are refused."""
_DIRECTIVE: Final = re.compile(r"#SBATCH\s+--(?P<name>[a-z0-9-]+)(?:[= ](?P<value>\S.*))?\s*")


def problems(script: str) -> Iterator[tuple[int, str]]:
    """Lines of a script for sbatch that it would refuse, or leave out without a word."""
    lines = script.splitlines()
    if not lines or not lines[0].startswith("#!"):
        yield 1, "a script for sbatch begins with #! and its shell"
    has_commands = False
    for number, line in enumerate(lines, start=1):
        if not line.startswith("#"):
            has_commands = has_commands or bool(line.strip())
            continue
        if not line.startswith("#SBATCH"):
            continue
        if has_commands:
            yield number, "sbatch reads no options below the first command; this one would be left out in silence"
        elif (match := _DIRECTIVE.fullmatch(line)) is None:
            yield number, f"sbatch options are written as #SBATCH --name=value, found {line!r}"
        elif match["name"] not in KNOWN:
            yield number, f"sbatch has no option --{match['name']}{did_you_mean(match['name'], sorted(KNOWN))}"
        elif match["value"] is None and match["name"] not in BARE:
            yield number, f"sbatch's option --{match['name']} needs a value"
