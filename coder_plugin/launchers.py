"""The ranks that a launcher gives its processes, as the variables that torch.distributed reads."""

from __future__ import annotations

import os
import re
from collections.abc import MutableMapping


def ranks_from_slurm(environment: MutableMapping[str, str] | None = None) -> None:
    """Set ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` from SLURM's variables, in place.

    torchrun and ``accelerate launch`` set these themselves; ``srun`` does not. Does nothing where ``RANK`` or ``WORLD_SIZE`` is
    set, outside of SLURM, for a single task, and in a batch script itself, whose variables name the job's tasks before ``srun``
    has started them.

    The first of the step's machines is ``MASTER_ADDR``, and a port drawn from the job's number is ``MASTER_PORT``, unless they
    are set.

    Args:
        environment: what is read and changed; None: ``os.environ``.

    Example:
        >>> task = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08]"}
        >>> ranks_from_slurm(task)
        >>> task["RANK"], task["WORLD_SIZE"], task["LOCAL_RANK"], task["MASTER_ADDR"]
        ('3', '4', '1', 'gpu07')
    """
    environment = os.environ if environment is None else environment
    if "SLURM_PROCID" not in environment or "RANK" in environment or "WORLD_SIZE" in environment:
        return
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS") or "1")  # SLURM_NTASKS is set in a batch script too
    if tasks < 2:
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = str(tasks)
    environment["LOCAL_RANK"] = environment.get("SLURM_LOCALID", "0")
    machines = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    environment.setdefault("MASTER_ADDR", first_machine(machines))
    job, step = (int(re.sub(r"\D", "", environment.get(name, "0")) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    environment.setdefault("MASTER_PORT", str(10_000 + (job + step) % 20_000))


def first_machine(machines: str) -> str:
    """The first of the machines in SLURM's short form.

    Example:
        >>> first_machine("rack1-gpu[03-05,09].site,other"), first_machine("one,two")
        ('rack1-gpu03.site', 'one')
    """
    name = re.match(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*", machines)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", name[0] if name else machines)
