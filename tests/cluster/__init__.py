"""A real Slurm cluster on one machine: munged, slurmctld, and slurmd on nodes with their own namespaces."""

from tests.cluster.bed import Bed, BedError, BedUnavailable, CommandFailed
from tests.cluster.toolchain import compile_in

__all__ = ["Bed", "BedError", "BedUnavailable", "CommandFailed", "compile_in"]
