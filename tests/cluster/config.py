"""Slurm's configuration files for a bed, as text."""

from collections.abc import Iterable, Iterator

NAMED = ("nodename", "partitionname", "frontendname", "nodeset", "downnodes")  # one line for each value of the key


def slurm_conf(
    folder: str,
    version: str,
    *,
    nodes: int,
    gpus: int,
    prolog: str | None = None,
    epilog: str | None = None,
    prolog_flags: str = "Alloc,Contain",
    lua: Iterable[str] = (),
    dbd: bool = False,
    extra: Iterable[str] = (),
) -> str:
    """slurm.conf; a line of `extra` takes the place of our line with the same key."""
    gres = f" Gres=gpu:fake:{gpus}" if gpus else ""
    lines = [
        "ClusterName=tp",
        "SlurmctldHost=ctl(10.77.0.1)",
        "SlurmUser=slurm",
        "SlurmdUser=root",
        "AuthType=auth/munge",
        "MpiDefault=none",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        "SlurmctldPidFile=/run/slurmctld.pid",
        "SlurmdPidFile=/run/slurmd.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd.%n.log",
        "SlurmctldDebug=debug",
        "SlurmdDebug=debug",
        "ProctrackType=proctrack/linuxproc",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "SlurmdParameters=config_overrides",  # nodes have as many CPUs as we say
        "SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=1000",
        "ReturnToService=0",
        "SlurmdTimeout=15",
        "SlurmctldTimeout=15",
        "InactiveLimit=0",
        "KillWait=5",
        "MinJobAge=600",
        "GresTypes=gpu",
    ]
    if version == "22.05":  # later versions have no such plugins: their default is none
        lines += ["TaskPlugin=task/none", "JobAcctGatherType=jobacct_gather/none"]
    if prolog_flags:
        lines.append(f"PrologFlags={prolog_flags}")
    if prolog:
        lines.append(f"Prolog={prolog}")
    if epilog:
        lines.append(f"Epilog={epilog}")
    if "cli_filter" in lua:
        lines.append("CliFilterPlugins=cli_filter/lua")
    if "job_submit" in lua:
        lines.append("JobSubmitPlugins=lua")
    if dbd:
        lines += [
            "AccountingStorageType=accounting_storage/slurmdbd",
            "AccountingStorageHost=ctl",
            "AccountingStoreFlags=job_comment",
            "AccountingStorageTRES=gres/gpu",
        ]
    lines += [
        f"NodeName=n[1-{nodes}] NodeAddr=10.77.0.[11-{10 + nodes}] CPUs=8 RealMemory=2000{gres} State=UNKNOWN",
        "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP",
    ]
    return "".join(f"{line}\n" for line in override(lines, extra))


def override(lines: Iterable[str], extra: Iterable[str]) -> Iterator[str]:
    """`lines` without those that a line of `extra` replaces, then `extra`."""
    extra = list(extra)
    replaced = {_key(line) for line in extra}
    yield from (line for line in lines if _key(line) not in replaced)
    yield from extra


def _key(line: str) -> str:
    key, _, rest = line.strip().partition("=")
    key = key.strip().lower()
    return f"{key}={rest.split()[0]}" if key in NAMED and rest.strip() else key


def gres_conf(folder: str, *, nodes: int, gpus: int) -> str:
    if not gpus:
        return "AutoDetect=off\n"
    return f"AutoDetect=off\nNodeName=n[1-{nodes}] Name=gpu Type=fake File={folder}/dev/nvidia[0-{gpus - 1}]\n"


def cgroup_conf(version: str) -> str:
    """Nodes see no cgroups; slurmd must not look for any."""
    return "CgroupPlugin=cgroup/v1\n" if version == "22.05" else "CgroupPlugin=disabled\n"


def slurmdbd_conf(folder: str) -> str:
    return f"""\
AuthType=auth/munge
DbdHost=ctl
DbdAddr=10.77.0.1
SlurmUser=slurm
DebugLevel=info
LogFile={folder}/log/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
"""
